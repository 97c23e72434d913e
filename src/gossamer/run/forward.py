"""The pipeline of a replica, and a forward pass through its stages without a backward, for validation and sampling."""

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
    """The pipeline of one replica as one rank runs it: schedule and stage links. A single stage is a pipeline too."""

    rank: int  # within it
    schedule: Schedule  # of a training step
    links: StageLinks
    evaluating: Callable[
        [int], tuple[Schedule, StageLinks]
    ]  # the same stages without a backward, for so many micro-batches

    @property
    def row(self) -> Sequence[Action]:
        """Return this rank's list of schedule actions."""
        return self.schedule.ranks[self.rank]

    @property
    def batches(self) -> frozenset[int]:
        """Return the micro-batches that this rank takes part in."""
        return self.schedule.batches_of(self.rank)

    @property
    def together(self) -> bool:
        """Return whether the stages lie on several ranks, so that ranks exchange activations."""
        return bool(self.schedule.dealt)

    def forward_only(self, microbatches: int) -> Pipeline:
        """Return the pipeline of the same stages without a backward, for `microbatches` micro-batches."""
        schedule, links = self.evaluating(microbatches)
        return replace(self, schedule=schedule, links=links)


@dataclass(slots=True)
class ForwardWork:
    """The work of one rank in a forward-only schedule; it collects the last stage's result of every micro-batch."""

    pieces: Mapping[int, ModelPart]
    stages: int
    batches: Mapping[int, MicroBatch]
    transfers: StepP2P
    step: int
    moves: Callable[[], None]
    results: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch

    def forward(self, stage: int, batch: int) -> None:
        """Run a stage forward on a micro-batch, and keep the result of the last stage."""
        self.moves()
        live = self.pieces[stage].forward(self.batches[batch], self.step, self.transfers.received(stage, batch))
        self.transfers.made(stage, batch, live.sent)
        if stage + 1 == self.stages:
            self.results[batch] = live.result

    def send(self, action: Action) -> None:
        """Send the activations of an action to the next stage."""
        self.transfers.send(action)

    def receive(self, action: Action) -> None:
        """Receive the activations of an action from the previous stage."""
        self.transfers.receive(action)

    def backward(self, stage: int, batch: int) -> None:
        """Raise AssertionError: a forward-only schedule has no backward."""
        raise AssertionError("there is no backward")

    backward_input = backward_weight = recompute = backward

    def reduce(self, stage: int) -> None:
        """Raise AssertionError: a forward-only schedule has no gradients."""
        raise AssertionError("there are no gradients")


def transfers_of(
    pump: CommThread,
    pieces: Mapping[int, ModelPart],
    pipeline: Pipeline,
    batches: Mapping[int, MicroBatch],
    at: tuple[int, int],
) -> StepP2P:
    """Start the point-to-point transfers of one execution of the schedule, and return them.

    The communication thread runs them after the messages it already has.
    """
    boundaries = {n: {s: held.boundary(p.rows) for s, held in pieces.items()} for n, p in batches.items()}
    return StepP2P(pump, pipeline.links, pipeline.row, boundaries, at)


def _nothing() -> None:
    pass


def forward_with_graphs(
    pump: CommThread,
    pieces: Mapping[int, ModelPart],
    pipeline: Pipeline,
    batches: Mapping[int, MicroBatch],
    *,
    step: int = 0,
    moves: Callable[[], None] = _nothing,
) -> dict[int, Tensor]:
    """Run a forward pass through the pipeline and return the loss of every micro-batch, on ranks with the last stage.

    All ranks of the pipeline must call it. `step`: selects the random numbers to draw; `moves`: called before each
    forward. Graphs are kept as long as they are used. Raises PeerLost.
    """
    transfers = transfers_of(pump, pieces, pipeline, batches, (0, 0))
    work = ForwardWork(pieces, pipeline.schedule.stages, batches, transfers, step, moves)
    execute(pipeline.schedule, RankBackend(pipeline.rank, work))
    transfers.finish()
    return work.results


run_forward = torch.no_grad()(forward_with_graphs)  # for validation, sampling, and steps without gradients
