"""A model in stages, as one rank holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.loss import Loss
from gossamer.model.forward_adapter import caller_of
from gossamer.model.precision import Precision
from gossamer.model.split.dataflow import CallOutput, DataFlow
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.split_points import StageSpec, canonical_names
from gossamer.model.split.stage import StageModule
from gossamer.p2p import TensorSpec
from gossamer.pipeline.p2p import StageBoundary, StageTensor
from gossamer.run.batches import MicroBatch, RankBatch
from gossamer.run.step_runner import ModelPart, ModelRuntime


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward as training has it, to learn what it does."""

    objective: Loss
    precision: Precision
    device: torch.device

    def __call__(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        rows = dict(batch)
        with self.precision.forward(self.device):
            return self.objective(caller_of(module, rows)(module, rows), rows).float()


@dataclass(frozen=True, slots=True)
class StagedModel:
    """`parts` are those of the first micro-batch; what a stage holds is the same for all of them. `stages` are this
    rank's, all in one module.
    """

    ways: InputVariants
    parts: tuple[StageSpec, ...]
    stages: Mapping[int, StageModule]
    groups: tuple[tuple[int, ...], ...]  # stage -> its ranks, within the pipeline
    digests: Mapping[str, int] = field(default_factory=dict)  # of initial values, as far as this rank has seen them

    @property
    def ranks(self) -> int:
        """Of one pipeline."""
        return max(map(max, self.groups)) + 1

    def stages_at(self, rank: int) -> tuple[int, ...]:
        """What lies on a rank within the pipeline."""
        return tuple(stage for stage, group in enumerate(self.groups) if rank in group)

    @property
    def holds(self) -> frozenset[str]:
        """Parameters and buffers of this rank, canonical names."""
        return frozenset().union(*(self.parts[s].holds for s in self.stages))

    @property
    def names(self) -> frozenset[str]:
        """Of the whole model's parameters and buffers."""
        return frozenset(canonical_names(self.ways.module).values())

    def holders(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Ranks within the pipeline that hold a parameter or buffer, by stage; every one where no stage owns it."""
        found = tuple(dict.fromkeys(self.groups[p.stage] for p in self.parts if name in p.holds))
        return found or tuple(dict.fromkeys(self.groups))

    def shared(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Parameters that are trained and held by several stages on different ranks, and these ranks."""
        trained = (name for name, p in self.ways.module.named_parameters() if p.requires_grad)
        return {name: at for name in trained if len(at := self.holders(name)) > 1}


@dataclass(frozen=True, slots=True)
class StagePart(ModelPart):
    """One stage."""

    engine: ModelRuntime
    ways: InputVariants
    stage: StageModule

    def boundary(self, rows: RankBatch) -> StageBoundary:
        flow, part = self._way(rows)
        return boundary_of(flow, part)

    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        self.stage.follow(*self._way(piece.rows))
        run = partial(self.engine.loss_of_copies, piece.rows, step=step, key=piece.key)
        return self.stage.forward(run, received, keep_graph=keep_graph)

    def _way(self, rows: RankBatch) -> tuple[DataFlow, StageSpec]:
        flow, parts = self.ways.of(rows, training=self.engine.module.training)
        return flow, parts[self.stage.part.stage]


def boundary_of(flow: DataFlow, part: StageSpec) -> StageBoundary:
    """What a stage receives and sends."""
    return StageBoundary(_edges(flow, part.receives), _edges(flow, part.sends))


def _edges(flow: DataFlow, values: Sequence[CallOutput]) -> tuple[StageTensor, ...]:
    made = [flow.calls[value.call].made(value.place) for value in values]
    return tuple(
        StageTensor(value, TensorSpec(tuple(m.shape), m.dtype, m.device), m.needs_grad)
        for value, m in zip(values, made, strict=True)
    )
