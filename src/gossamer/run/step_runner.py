"""What the player's actions do on a rank: a model, or its stages, between the data and the gradients."""

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
from gossamer.model.split.recompute import InPlaceWrites, nothing_saved, once_more, python_of
from gossamer.model.unit_seeds import UnitSeeds
from gossamer.pipeline.p2p import StageBoundary, StepP2P
from gossamer.run.batches import MicroBatch, RankBatch
from gossamer.spec.action import Action


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """An unmodified model and how to call it; everything here outlives the step."""

    module: nn.Module  # the user's, perhaps compiled
    caller: ForwardAdapter
    objective: Loss
    precision: Precision
    randomness: UnitSeeds
    device: torch.device

    def loss(self, rows: RankBatch, *, step: int, key: int) -> Tensor:
        """Mean loss over the valid labels of `rows`, float32; randomness depends on (seed, step, key) alone."""
        with self.randomness.at(step, key), self.precision.forward(self.device):
            try:
                output = self.caller(self.module, rows)
            except IndexError as error:
                explain(error, rows.get("input_ids"))
                raise
            return self.objective(output, rows).float()

    def loss_of_copies(self, rows: RankBatch, *, step: int, key: int) -> Tensor:
        """The same, and `rows` are afterwards as they were: somebody else runs a forward on them."""
        return self.loss(_copied(rows), step=step, key=key)


def _copied(rows: RankBatch) -> RankBatch:
    """What was one tensor is one copy."""
    copies = {id(x): x.clone() for x in rows.values() if isinstance(x, Tensor)}
    return {name: copies.get(id(x), x) for name, x in rows.items()}


class ModelPart(ABC):
    """A stage of the model, as this rank holds it."""

    engine: ModelRuntime

    @abstractmethod
    def boundary(self, rows: RankBatch) -> StageBoundary:
        """What it receives and sends of a micro-batch like `rows`."""

    @abstractmethod
    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        """Run it; the result of the last stage is the mean loss of the micro-batch. Without `keep_graph` a
        `InFlight.recompute` comes before its backward.
        """


@dataclass(frozen=True, slots=True)
class UnsplitModel(ModelPart):
    """The only stage there is."""

    engine: ModelRuntime
    _writes: InPlaceWrites = field(default_factory=InPlaceWrites)

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
        python = python_of(module)
        with nothing_saved():
            loss, buffers = self._writes.run(again, module, python)
        return InFlight(
            {}, {}, loss.detach(), partial(once_more, lambda: InFlight({}, {}, again()), module, buffers, python)
        )


def _nothing() -> None:
    pass


@dataclass(slots=True)
class StepRunner:
    """One step of one rank: what the actions of its list do, called by the player.

    Gradients are those of the mean loss over `labels` of them: micro-batch b counts with weight_b / labels, so unequal
    micro-batches are exact. `scale` multiplies the loss (fp16).
    """

    pieces: Mapping[int, ModelPart]  # the stages of this rank
    stages: int
    step: int
    microbatches: Mapping[int, MicroBatch]  # that this rank has a part in, by number
    weights: Mapping[int, float]  # valid labels of each of them
    labels: Callable[[], float]  # of all that the pipeline works on
    scale: float
    transfers: StepP2P
    recomputed: frozenset[tuple[int, int]]  # (stage, micro-batch) that keeps no graph until it is recomputed
    on_last_backward: Callable[[], None]
    on_reduce: Callable[[], None]
    moves: Callable[[], None] = _nothing  # told of every forward and backward
    losses: dict[int, Tensor] = field(default_factory=dict)
    compute_s: float = 0.0
    _live: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    _backwards: int = 0
    _reduced: int = 0

    @property
    def weight(self) -> float:
        """Valid labels of this rank's micro-batches in this step."""
        return sum(self.weights.values())

    @property
    def speaks(self) -> bool:
        """Whether this rank knows the losses."""
        return self.stages - 1 in self.pieces

    def forward(self, stage: int, batch: int) -> None:
        self.moves()
        began, piece = time.perf_counter(), self.microbatches[batch]
        received, keep = self.transfers.received(stage, batch), (stage, batch) not in self.recomputed
        live = self.pieces[stage].forward(piece, self.step, received, keep_graph=keep)
        if stage + 1 == self.stages:
            self.losses[batch] = live.result.detach() * self._part(batch, self.weight)
        self._live[stage, batch] = live
        self.transfers.made(stage, batch, live.sent)
        self.compute_s += time.perf_counter() - began

    def recompute(self, stage: int, batch: int) -> None:
        began = time.perf_counter()
        self._live[stage, batch].recompute()
        self.compute_s += time.perf_counter() - began

    def backward(self, stage: int, batch: int) -> None:
        with self._backward(stage, batch, is_last=True):
            live = self._live.pop((stage, batch))
            back = live.backward(self.transfers.gradients(stage, batch), loss=self._scaled(stage, batch, live))
            self.transfers.made_gradients(stage, batch, back)

    def backward_input(self, stage: int, batch: int) -> None:
        with self._backward(stage, batch, is_last=False):
            live = self._live[stage, batch]
            back = live.backward_input(self.transfers.gradients(stage, batch), loss=self._scaled(stage, batch, live))
            self.transfers.made_gradients(stage, batch, back)

    def backward_weight(self, stage: int, batch: int) -> None:
        with self._backward(stage, batch, is_last=True):
            self._live.pop((stage, batch)).backward_weight()

    @contextmanager
    def _backward(self, stage: int, batch: int, *, is_last: bool) -> Iterator[None]:
        """Around a backward, or a part of one; `is_last`: nothing of the micro-batch comes after it."""
        self.moves()
        began = time.perf_counter()
        self._backwards += is_last
        if is_last and self._backwards == len(self.microbatches) * len(self.pieces):
            self.on_last_backward()
        # A saver may recompute a unit in here: under the forward's key it draws the forward's numbers.
        with self.pieces[stage].engine.randomness.at(self.step, self.microbatches[batch].key):
            yield
        self.compute_s += time.perf_counter() - began

    def _part(self, batch: int, labels: float) -> float:
        """Of the micro-batch, in the mean over so many labels."""
        return self.weights[batch] / labels if labels else 0.0

    def _scaled(self, stage: int, batch: int, live: InFlight) -> Tensor | None:
        """What the last stage's backward begins with."""
        if stage + 1 < self.stages:
            return None
        loss: Tensor = live.result
        part = self._part(batch, self.labels())
        # Rows without a valid label have a mean over nothing (nan); they still must run backward, with zeros.
        return loss * (part * self.scale) if part else torch.nan_to_num(loss) * 0.0

    def send(self, action: Action) -> None:
        self.transfers.send(action)

    def receive(self, action: Action) -> None:
        self.transfers.receive(action)

    def reduce(self, stage: int) -> None:
        self._reduced += 1
        if self._reduced == len(self.pieces):
            self.transfers.finish()
            self.on_reduce()

    def loss(self) -> float:
        """Mean over this rank's valid labels; 0 where there are none, or another rank knows it."""
        parts = [loss for batch, loss in self.losses.items() if self.weights[batch]]
        return float(torch.stack(parts).sum()) if parts else 0.0
