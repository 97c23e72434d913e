"""The stages of a model in time and place, and a way through them without a backward: for validation and sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommThread
from gossamer.pipeline.executor import execute
from gossamer.pipeline.p2p import StepP2P
from gossamer.pipeline.rank_backend import RankBackend
from gossamer.pipeline.schedule import Schedule
from gossamer.pipeline.stage_links import StageLinks
from gossamer.run.batches import MicroBatch
from gossamer.run.step_runner import ModelPart
from gossamer.spec.action import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A replica's stages in time and place. One stage is a pipeline too."""

    rank: int  # within it
    schedule: Schedule  # of a training step
    links: StageLinks
    evaluating: Callable[
        [int], tuple[Schedule, StageLinks]
    ]  # the same stages without a backward, for so many micro-batches

    @property
    def row(self) -> Sequence[Action]:
        """What this rank does."""
        return self.schedule.ranks[self.rank]

    @property
    def batches(self) -> frozenset[int]:
        """The micro-batches that this rank has a part in."""
        return self.schedule.batches_of(self.rank)

    @property
    def together(self) -> bool:
        """Whether stages lie on several ranks, so that paths of micro-batches cross."""
        return bool(self.schedule.dealt)

    def forward_only(self, microbatches: int) -> Pipeline:
        """The same stages without a backward."""
        schedule, links = self.evaluating(microbatches)
        return replace(self, schedule=schedule, links=links)


@dataclass(slots=True)
class ForwardWork:
    """What the last stage makes of every micro-batch, where this rank holds it."""

    pieces: Mapping[int, ModelPart]
    stages: int
    batches: Mapping[int, MicroBatch]
    transfers: StepP2P
    step: int
    moves: Callable[[], None]
    results: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch

    def forward(self, stage: int, batch: int) -> None:
        self.moves()
        live = self.pieces[stage].forward(self.batches[batch], self.step, self.transfers.received(stage, batch))
        self.transfers.made(stage, batch, live.sent)
        if stage + 1 == self.stages:
            self.results[batch] = live.result

    def send(self, action: Action) -> None:
        self.transfers.send(action)

    def receive(self, action: Action) -> None:
        self.transfers.receive(action)

    def backward(self, stage: int, batch: int) -> None:
        raise AssertionError("there is no backward")

    backward_input = backward_weight = recompute = backward

    def reduce(self, stage: int) -> None:
        raise AssertionError("there are no gradients")


def transfers_of(
    pump: CommThread,
    pieces: Mapping[int, ModelPart],
    pipeline: Pipeline,
    batches: Mapping[int, MicroBatch],
    at: tuple[int, int],
) -> StepP2P:
    """Begin those of a play. After what the pump has to do before the first of them, before all else."""
    boundaries = {n: {s: held.boundary(p.rows) for s, held in pieces.items()} for n, p in batches.items()}
    return StepP2P(pump, pipeline.links, pipeline.row, boundaries, at)


def _nothing() -> None:
    pass


@torch.no_grad()
def run_forward(
    pump: CommThread,
    pieces: Mapping[int, ModelPart],
    pipeline: Pipeline,
    batches: Mapping[int, MicroBatch],
    *,
    step: int = 0,
    moves: Callable[[], None] = _nothing,
) -> dict[int, Tensor]:
    """By micro-batch, what the objective made of it, on the ranks that hold the last stage. All ranks of the pipeline
    call it. `step`: whose random numbers are drawn; `moves` is called before each forward. Raises PeerLost.
    """
    transfers = transfers_of(pump, pieces, pipeline, batches, (0, 0))
    work = ForwardWork(pieces, pipeline.schedule.stages, batches, transfers, step, moves)
    execute(pipeline.schedule, RankBackend(pipeline.rank, work))
    transfers.finish()
    return work.results
