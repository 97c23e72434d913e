"""A model in pipeline stages, as one rank holds it."""

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
    """A forward pass with loss and precision as in training, for tracing a module."""

    objective: Loss
    precision: Precision
    device: torch.device

    def __call__(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        rows = dict(batch)
        with self.precision.autocast(self.device):
            return self.objective(caller_of(module, rows)(module, rows), rows).float()


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A model in pipeline stages on one rank.

    `ways`: the traces of the model, one per kind of batch. `parts`: the stages as traced with the first micro-batch;
    the modules of a stage are the same for all micro-batches. `stages`: the stages of this rank, all in one module.
    """

    ways: InputVariants
    parts: tuple[StageSpec, ...]
    stages: Mapping[int, StageModule]
    groups: tuple[tuple[int, ...], ...]  # stage -> its ranks, within the pipeline
    digests: Mapping[str, int] = field(default_factory=dict)  # of initial values, as far as this rank has seen them

    @property
    def ranks(self) -> int:
        """Return the number of ranks of one pipeline."""
        return max(map(max, self.groups)) + 1

    def stages_at(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank of the pipeline holds."""
        return tuple(stage for stage, group in enumerate(self.groups) if rank in group)

    @property
    def holds(self) -> frozenset[str]:
        """Return the canonical names of this rank's parameters and buffers."""
        return frozenset().union(*(self.parts[s].holds for s in self.stages))

    @property
    def names(self) -> frozenset[str]:
        """Return the canonical names of the full model's parameters and buffers."""
        return frozenset(canonical_names(self.ways.module).values())

    def holders(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the pipeline ranks that hold a parameter or buffer, by stage; every stage's if none owns it."""
        found = tuple(dict.fromkeys(self.groups[p.stage] for p in self.parts if name in p.holds))
        return found or tuple(dict.fromkeys(self.groups))

    def parameters_on_several_stages(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the trained parameters that several stages on different ranks hold, with these ranks."""
        trained = (name for name, p in self.ways.module.named_parameters() if p.requires_grad)
        return {name: at for name in trained if len(at := self.holders(name)) > 1}


@dataclass(frozen=True, slots=True)
class StagePart(ModelPart):
    """A pipeline stage that this rank runs."""

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
    """Return the stage boundary: the tensors that a stage receives and sends."""
    return StageBoundary(_edges(flow, part.receives), _edges(flow, part.sends))


def _edges(flow: DataFlow, values: Sequence[CallOutput]) -> tuple[StageTensor, ...]:
    made = [flow.calls[value.call].made(value.place) for value in values]
    return tuple(
        StageTensor(value, TensorSpec(tuple(m.shape), m.dtype, m.device), m.needs_grad)
        for value, m in zip(values, made, strict=True)
    )
