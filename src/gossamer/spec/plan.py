"""The plan of a run: which rank computes what. The planner writes it, plan.yaml holds it, the run executes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gossamer.spec.cost import Cost
from gossamer.spec.earlier_recompute import as_saver
from gossamer.spec.mesh import Mesh
from gossamer.spec.method_config import Exchanges, Written
from gossamer.spec.network import Link

PLAN_FORMAT = 3
BUCKET_BYTES = 25 * 2**20
LOOK_AHEAD = 2  # jobs that start before the next message of an earlier one, where no order is planned


class MeshSizes(BaseModel):
    """The sizes of the mesh axes. Ranks are numbered with the last axis fastest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replica: Annotated[int, Field(ge=1)] = 1
    pipe: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="before")
    @classmethod
    def _without_axes_of_one(cls, values: Any) -> Any:
        """Drop the axes of earlier versions that divide nothing: they have size 1."""
        if not isinstance(values, Mapping):
            return values
        return {axis: size for axis, size in values.items() if axis in cls.model_fields or size != 1}

    @property
    def size(self) -> int:
        return self.replica * self.pipe

    @property
    def in_stages(self) -> bool:
        """Return whether the model is split into pipeline stages."""
        return self.pipe > 1


class Plan(BaseModel):
    """The complete split of a run's work over its ranks; holds no parameter values.

    `rows[r]` is the number of sequences per step of replica r, `microbatches[r]` the number of micro-batches they form.
    `stage_ranks`: the ranks of each stage, where the plan is one replica that divides its micro-batches stage by stage.
    `batch_fractions` is then each rank's fraction of the work of its stage, otherwise each replica's fraction of the
    batch. `buckets` and `turns` are what `plan.exchange: auto` has timed:
    parameters of no bucket get buckets of `bucket_bytes`, and steps with other exchanges than were timed start their
    messages by `look_ahead`.
    `reasons` holds the reason for each decision.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Annotated[int, Field(ge=1, le=PLAN_FORMAT)] = PLAN_FORMAT
    mesh: MeshSizes = MeshSizes()
    batch_fractions: tuple[float, ...] = (1.0,)
    rows: tuple[int, ...]
    microbatches: tuple[int, ...]
    pipeline_schedule: Written = "single_stage"
    units: tuple[str, ...] = ()  # modules that are never divided, each with its own random state; empty: not known yet
    cuts: tuple[str, ...] = ()  # the first unit of every stage; empty: the model is one stage
    stage_ranks: tuple[tuple[int, ...], ...] = ()  # the ranks of every stage; empty: each replica has one of its own
    activation_compression: Written | tuple[Written, ...] = (
        "none"  # activation compression: for all stage boundaries, or one each
    )
    exchange: Exchanges = "dense"
    adapted_from: Exchanges = ""  # what `plan.adapt` started from and compares with; "": it changed nothing
    sync: Written = "every_step"
    sharding: Written = "none"  # how the optimizer states are sharded
    savers: tuple[Written, ...] = ()  # what saves memory, each on top of those before it
    islands: tuple[tuple[int, ...], ...] = ()  # ranks behind one fast link each; empty: not known, or no islands
    bucket_bytes: int = BUCKET_BYTES
    buckets: tuple[tuple[str, ...], ...] = ()  # the parameters of every gradient bucket, in the order of sending
    turns: tuple[int, ...] = ()  # the bucket of each turn of the communication thread
    links: dict[str, Link] = {}  # by level, those that `auto` chose the exchange for; empty: unknown
    look_ahead: int = LOOK_AHEAD
    backend: str = "gloo"
    reasons: dict[str, str] = {}
    forecast: Cost = Cost()

    @model_validator(mode="before")
    @classmethod
    def _with_recompute_as_saver(cls, values: Any) -> Any:
        return as_saver(values)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        replicas = self.mesh.replica
        for name in ("batch_fractions", "rows", "microbatches"):
            wanted = self.ranks if self.stage_ranks and name == "batch_fractions" else replicas
            if len(getattr(self, name)) != wanted:
                each = "replica" if wanted == replicas else "rank"
                got = len(getattr(self, name))
                raise ValueError(f"{name}: wanted {wanted} entries, one for each {each}, got {got}")
        for replica, (rows, pieces) in enumerate(zip(self.rows, self.microbatches, strict=True)):
            if not 1 <= pieces <= rows:
                raise ValueError(
                    f"microbatches: wanted 1 to {rows} micro-batches for replica {replica}, which has {rows} rows, "
                    f"got {pieces}"
                )
        if self.stage_ranks:
            self._check_stages()
        self._check_buckets()
        return self

    def _check_buckets(self) -> None:
        """Raise ValueError for a parameter in two buckets: its gradient has one place in memory."""
        home = dict[str, int]()
        for number, names in enumerate(self.buckets):
            for name in names:
                if home.setdefault(name, number) != number or names.count(name) > 1:
                    raise ValueError(f"buckets names {name} twice, in bucket {home[name]} and in bucket {number}")

    def _check_stages(self) -> None:
        if (self.mesh.replica, self.mesh.pipe) != (1, len(self.stage_ranks)):
            raise ValueError(
                f"stage_ranks: wanted {self.mesh.pipe} stages (mesh.pipe) and mesh.replica 1, "
                f"got {len(self.stage_ranks)} stages and mesh.replica {self.mesh.replica}"
            )
        if sorted(rank for group in self.stage_ranks for rank in group) != list(range(self.ranks)):
            raise ValueError(f"stage_ranks {self.stage_ranks} must name every rank once, from 0 on")
        if self.microbatches[0] < max(map(len, self.stage_ranks)):
            raise ValueError(
                f"microbatches: wanted at least {max(map(len, self.stage_ranks))}, the ranks of the largest stage in "
                f"{self.stage_ranks}, got {self.microbatches[0]}: raise train.accumulate"
            )

    @property
    def axes(self) -> Mesh:
        """The ranks of the run by mesh axes."""
        stages = self.stage_ranks or tuple((place,) for place in range(self.mesh.pipe))
        return Mesh(self.mesh.replica, stages, self.islands)

    @property
    def ranks(self) -> int:
        """The number of ranks in the run."""
        return self.axes.size

    def boundary_of(self, stage: int) -> Written:
        """Return the activation compression between `stage` and the next stage."""
        return (
            self.activation_compression[stage]
            if isinstance(self.activation_compression, tuple)
            else self.activation_compression
        )

    @property
    def batch(self) -> int:
        """Sequences per step over all replicas."""
        return sum(self.rows)
