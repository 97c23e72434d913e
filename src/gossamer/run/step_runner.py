"""Run the schedule's actions on a rank: forward, backward and transfers of a model or of its pipeline stages."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gossamer.loss import Loss
from gossamer.model.forward_adapter import ForwardAdapter
from gossamer.model.input_checks import explain
from gossamer.model.precision import Precision
from gossamer.model.side_effects import gradless
from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.recompute import InPlaceWrites, LastPython, nothing_saved, once_more
from gossamer.model.unit_seeds import UnitSeeds
from gossamer.pipeline.p2p import StageBoundary, StepP2P
from gossamer.run.batches import MicroBatch, RankBatch
from gossamer.run.task import Task
from gossamer.sharding import TiledWeight
from gossamer.spec.action import Action


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """An unmodified model with its loss, precision and random state, ready to be called; it outlives the steps."""

    module: nn.Module  # the user's, perhaps compiled
    caller: ForwardAdapter
    objective: Loss
    precision: Precision
    randomness: UnitSeeds
    device: torch.device
    without_savers: Callable[[], None] = lambda: None  # takes what saves memory off the module again
    told: str = ""  # by savers, for the log
    tiled: tuple[TiledWeight, ...] = ()  # weights of layers that run in tiles

    def loss(self, rows: RankBatch, *, step: int, key: int) -> Tensor:
        """Return the mean loss over the valid labels of `rows`, float32.

        Random numbers depend on (seed, step, key) alone.
        """
        with self.randomness.at(step, key), self.precision.autocast(self.device):
            try:
                output = self.caller(self.module, rows)
            except IndexError as error:
                explain(error, rows.get("input_ids"))
                raise
            return self.objective(output, rows).float()

    def loss_of_copies(self, rows: RankBatch, *, step: int, key: int) -> Tensor:
        """Return the same loss from copies of `rows`, which stay unchanged for another forward."""
        return self.loss(_copied(rows), step=step, key=key)


def _copied(rows: RankBatch) -> RankBatch:
    """Return copies of the rows; names that shared one tensor share one copy."""
    copies = {id(x): x.clone() for x in rows.values() if isinstance(x, Tensor)}
    return {name: copies.get(id(x), x) for name, x in rows.items()}


class ModelPart(ABC):
    """A pipeline stage of the model, as this rank holds it."""

    engine: ModelRuntime

    @abstractmethod
    def boundary(self, rows: RankBatch) -> StageBoundary:
        """Return the boundary tensors, received and sent, for a micro-batch like `rows`."""

    @abstractmethod
    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        """Run the stage forward; the last stage's result is the mean loss of the micro-batch.

        Without `keep_graph`, the schedule calls `InFlight.recompute` before the backward.
        """


@dataclass(frozen=True, slots=True)
class UnsplitModel(ModelPart):
    """The single stage of a model without pipeline parallelism."""

    engine: ModelRuntime
    _writes: InPlaceWrites = field(default_factory=InPlaceWrites)
    _python: LastPython = field(default_factory=LastPython)

    def boundary(self, rows: RankBatch) -> StageBoundary:
        return StageBoundary()

    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        run = partial(self.engine.loss, piece.rows, step=step, key=piece.key)
        again = partial(self.engine.loss_of_copies, piece.rows, step=step, key=piece.key)
        if not torch.is_grad_enabled():
            return InFlight({}, {}, gradless(run))
        if keep_graph:
            return InFlight({}, {}, run())
        module = self.engine.module
        python = self._python.of(module)
        with nothing_saved():
            loss, buffers = self._writes.run(again, module, python)
        anew = partial(once_more, lambda: InFlight({}, {}, again()), module, buffers, python, self._python)
        return InFlight({}, {}, loss.detach(), anew)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """The callbacks of a step's work into averaging and supervision."""

    on_last_backward: Callable[[], None]
    on_reduce: Callable[[], None]
    moves: Callable[[], None]  # called at every forward and backward


@dataclass(slots=True)
class StepRunner:
    """The work of one rank in one step: the methods that the schedule runtime calls for each action.

    Gradients are those of the mean loss over `labels` valid labels: micro-batch b counts with weight_b / labels, so
    unequal micro-batches are exact.
    """

    pieces: Mapping[int, ModelPart]  # the stages of this rank
    stages: int
    task: Task
    labels: Callable[[], float]  # of all that the pipeline works on
    transfers: StepP2P
    recomputed: frozenset[tuple[int, int]]  # (stage, micro-batch) that keeps no graph until it is recomputed
    hooks: StepHooks
    losses: dict[int, Tensor] = field(default_factory=dict)
    compute_s: float = 0.0
    _live: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    _backwards: int = 0
    _reduced: int = 0

    @property
    def weight(self) -> float:
        """Return the number of valid labels of this rank's micro-batches in this step."""
        return sum(self.task.weights.values())

    @property
    def speaks(self) -> bool:
        """Return whether this rank computes the losses, because it holds the last stage."""
        return self.stages - 1 in self.pieces

    def forward(self, stage: int, batch: int) -> None:
        """Run a stage forward on a micro-batch, and hand its outputs to the transfers."""
        self.hooks.moves()
        began, piece = time.perf_counter(), self.task.pieces[batch]
        received, keep = self.transfers.received(stage, batch), (stage, batch) not in self.recomputed
        live = self.pieces[stage].forward(piece, self.task.window.step, received, keep_graph=keep)
        if stage + 1 == self.stages:
            self.losses[batch] = live.result.detach() * self._part(batch, self.weight)
        self._live[stage, batch] = live
        self.transfers.made(stage, batch, live.sent)
        self.compute_s += time.perf_counter() - began

    def recompute(self, stage: int, batch: int) -> None:
        """Recompute the forward of a stage on a micro-batch, before its backward."""
        began = time.perf_counter()
        self._live[stage, batch].recompute()
        self.compute_s += time.perf_counter() - began

    def backward(self, stage: int, batch: int) -> None:
        """Run the full backward of a stage on a micro-batch, and hand its input gradients to the transfers."""
        with self._backward(stage, batch, is_last=True):
            live = self._live.pop((stage, batch))
            back = live.backward(self.transfers.gradients(stage, batch), loss=self._scaled(stage, batch, live))
            self.transfers.made_gradients(stage, batch, back)

    def backward_input(self, stage: int, batch: int) -> None:
        """Compute only the gradients of a stage's inputs on a micro-batch (the I half of a split backward)."""
        with self._backward(stage, batch, is_last=False):
            live = self._live[stage, batch]
            back = live.backward_input(self.transfers.gradients(stage, batch), loss=self._scaled(stage, batch, live))
            self.transfers.made_gradients(stage, batch, back)

    def backward_weight(self, stage: int, batch: int) -> None:
        """Compute the gradients of a stage's parameters on a micro-batch (the W half of a split backward)."""
        with self._backward(stage, batch, is_last=True):
            self._live.pop((stage, batch)).backward_weight()

    @contextmanager
    def _backward(self, stage: int, batch: int, *, is_last: bool) -> Iterator[None]:
        """Wrap a backward or a part of one; `is_last`: it is the last work on the micro-batch in this stage."""
        self.hooks.moves()
        began = time.perf_counter()
        self._backwards += is_last
        if is_last and self._backwards == len(self.task.pieces) * len(self.pieces):
            self.hooks.on_last_backward()
        # A saver may recompute a unit in here: under the forward's key it draws the forward's numbers.
        with self.pieces[stage].engine.randomness.at(self.task.window.step, self.task.pieces[batch].key):
            yield
        self.compute_s += time.perf_counter() - began

    def _part(self, batch: int, labels: float) -> float:
        """Return the weight of a micro-batch in the mean over `labels` valid labels."""
        return self.task.weights[batch] / labels if labels else 0.0

    def _scaled(self, stage: int, batch: int, live: InFlight) -> Tensor | None:
        """Return the scaled loss that the last stage's backward begins with; None for other stages."""
        if stage + 1 < self.stages:
            return None
        loss: Tensor = live.result
        part = self._part(batch, self.labels())
        # Rows without a valid label have a mean over nothing (nan); they still must run backward, with zeros.
        return loss * (part * self.task.window.scale) if part else torch.nan_to_num(loss) * 0.0

    def send(self, action: Action) -> None:
        """Send the activations or gradients of an action."""
        self.transfers.send(action)

    def receive(self, action: Action) -> None:
        """Receive the activations or gradients of an action."""
        self.transfers.receive(action)

    def reduce(self, stage: int) -> None:
        """Finish the transfers and average the gradients, once all stages of this rank have reached this action."""
        self._reduced += 1
        if self._reduced == len(self.pieces):
            self.transfers.finish()
            self.hooks.on_reduce()

    def loss(self) -> float:
        """Return the mean loss over this rank's valid labels; 0 if there are none, or if another rank computes it."""
        parts = [loss for batch, loss in self.losses.items() if self.task.weights[batch]]
        return float(torch.stack(parts).sum()) if parts else 0.0
