"""A plan: who does what. Written by the planner, kept in plan.yaml, obeyed by the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gossamer.spec.cost import Cost
from gossamer.spec.method_config import Exchanges, Written

PLAN_FORMAT = 1
BUCKET_BYTES = 25 * 2**20


class Mesh(BaseModel):
    """Sizes of the named axes. Ranks are numbered with the last axis fastest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replica: Annotated[int, Field(ge=1)] = 1
    pipe: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="before")
    @classmethod
    def _without_axes_of_one(cls, values: Any) -> Any:
        """Plans of earlier versions name axes that nothing divides: of size 1 they say nothing."""
        if not isinstance(values, Mapping):
            return values
        return {axis: size for axis, size in values.items() if axis in cls.model_fields or size != 1}

    @property
    def size(self) -> int:
        return self.replica * self.pipe


class Plan(BaseModel):
    """Everything a run needs to know about the split of the work; nothing about the model's values.

    `rows[r]` is the number of sequences of each step that replica r computes, `microbatches[r]` in how many pieces.
    Where `stages` says on which ranks each stage lies, these are one replica that divides its micro-batches stage by
    stage, and `share` is every rank's part of its stage.
    `reasons` says, per decision, why it was taken: what `--explain` prints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Annotated[int, Field(ge=1, le=PLAN_FORMAT)] = PLAN_FORMAT
    mesh: Mesh = Mesh()
    share: tuple[float, ...] = (1.0,)
    rows: tuple[int, ...]
    microbatches: tuple[int, ...]
    schedule: Written = "one_stage"
    units: tuple[str, ...] = ()  # what is never divided, and has randomness of its own; empty: not known yet
    cuts: tuple[str, ...] = ()  # the first unit of every stage; empty: the model is one stage
    stages: tuple[tuple[int, ...], ...] = ()  # the ranks of every stage; empty: each replica has one of its own
    boundary: Written | tuple[Written, ...] = "plain"  # how tensors cross between stages: one way, or one per border
    exchange: Exchanges = "dense"
    adapted_from: Exchanges = ""  # what `plan.adapt` started from and compares with; "": it changed nothing
    sync: Written = "every_step"
    states: Written = "whole"  # where the update rule's state lies
    islands: tuple[tuple[int, ...], ...] = ()  # ranks behind one fast link each; empty: not known, or no islands
    bucket_bytes: int = BUCKET_BYTES
    look_ahead: int = 4
    backend: str = "gloo"
    reasons: dict[str, str] = {}
    forecast: Cost = Cost()

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        replicas = self.mesh.replica
        for name in ("share", "rows", "microbatches"):
            wanted = self.ranks if self.stages and name == "share" else replicas
            if len(getattr(self, name)) != wanted:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, the mesh has {wanted} replicas")
        for replica, (rows, pieces) in enumerate(zip(self.rows, self.microbatches, strict=True)):
            if not 1 <= pieces <= rows:
                raise ValueError(
                    f"replica {replica} has {rows} rows and {pieces} micro-batches: need 1 <= that <= rows"
                )
        if self.stages:
            self._check_stages()
        return self

    def _check_stages(self) -> None:
        if (self.mesh.replica, self.mesh.pipe) != (1, len(self.stages)):
            raise ValueError(f"stages lists {len(self.stages)} for a mesh of {self.mesh.replica} x {self.mesh.pipe}")
        if sorted(rank for group in self.stages for rank in group) != list(range(self.ranks)):
            raise ValueError(f"stages {self.stages} must name every rank once, from 0 on")
        if self.microbatches[0] < max(map(len, self.stages)):
            raise ValueError(f"{self.microbatches[0]} micro-batches are fewer than the ranks of a stage: {self.stages}")

    @property
    def width(self) -> int:
        """Ranks that one replica of the model lies on."""
        return sum(map(len, self.stages)) or self.mesh.pipe

    @property
    def ranks(self) -> int:
        """All that take part."""
        return self.width if self.stages else self.mesh.size

    def place_of(self, rank: int) -> tuple[int, int]:
        """Which replica it is a part of, and which rank it is there."""
        return divmod(rank, self.width)

    def boundary_of(self, stage: int) -> Written:
        """How tensors cross from `stage` to the next."""
        return self.boundary[stage] if isinstance(self.boundary, tuple) else self.boundary

    @property
    def batch(self) -> int:
        """Sequences per step over all replicas."""
        return sum(self.rows)
