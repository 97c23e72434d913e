"""The whole model as one stage: what the player's actions do on a rank that holds all of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.loss import Objective
from gossamer.model.call import Caller
from gossamer.model.precision import Precision
from gossamer.model.randomness import UnitSeeds
from gossamer.run.batches import Batch, MicroBatch


@dataclass(frozen=True, slots=True)
class Engine:
    """An unmodified model and how to call it; everything here outlives the step."""

    module: nn.Module  # the user's, perhaps compiled
    caller: Caller
    objective: Objective
    precision: Precision
    randomness: UnitSeeds
    device: torch.device

    def loss(self, rows: Batch, *, step: int, key: int) -> Tensor:
        """Mean loss over the valid labels of `rows`, float32; randomness depends on (seed, step, key) alone."""
        with self.randomness.at(step, key), self.precision.forward(self.device):
            return self.objective(self.caller(self.module, rows), rows).float()


@dataclass(slots=True)
class StepWork:
    """One step of one rank: forward and backward by micro-batch number, called by the player.

    Gradients are those of the mean loss over all of this rank's valid labels: micro-batch b counts with
    weight_b / (sum of weights), so unequal micro-batches are exact. `scale` multiplies the loss (fp16).
    """

    engine: Engine
    step: int
    microbatches: list[MicroBatch]
    scale: float
    on_last_backward: Callable[[], None]
    on_reduce: Callable[[], None]
    losses: dict[int, Tensor] = field(default_factory=dict)
    compute_s: float = 0.0
    _live: dict[int, Tensor] = field(default_factory=dict)
    _weights: list[float] = field(default_factory=list)
    _backwards: int = 0

    def __post_init__(self) -> None:
        self._weights = [float(self.engine.objective.weight(m.rows)) for m in self.microbatches]

    @property
    def weight(self) -> float:
        """Valid labels of this rank in this step."""
        return sum(self._weights)

    def forward(self, stage: int, batch: int) -> None:
        began = time.perf_counter()
        piece = self.microbatches[batch]
        loss = self.engine.loss(piece.rows, step=self.step, key=piece.key)
        part = self._weights[batch] / self.weight if self.weight else 0.0
        self.losses[batch] = loss.detach() * part
        # Rows without a valid label have a mean over nothing (nan); they still must run backward, with zeros.
        factor = part * self.scale
        self._live[batch] = loss * factor if part else torch.nan_to_num(loss) * 0.0
        self.compute_s += time.perf_counter() - began

    def backward(self, stage: int, batch: int) -> None:
        began = time.perf_counter()
        self._backwards += 1
        if self._backwards == len(self.microbatches):
            self.on_last_backward()
        # A saver may recompute a unit in here: under the forward's key it draws the forward's numbers.
        with self.engine.randomness.at(self.step, self.microbatches[batch].key):
            self._live.pop(batch).backward()  # type: ignore[no-untyped-call]
        self.compute_s += time.perf_counter() - began

    def reduce(self, stage: int) -> None:
        self.on_reduce()

    def loss(self) -> float:
        """Mean over this rank's valid labels; 0 where there are none."""
        parts = [loss for batch, loss in self.losses.items() if self._weights[batch]]
        return float(torch.stack(parts).sum()) if parts else 0.0


@dataclass(slots=True)
class EvaluationWork:
    """Forward only: sums of losses and labels over some pieces, without a graph."""

    engine: Engine
    pieces: list[Batch]
    total: float = 0.0  # sum of the losses of all valid labels, nats
    weight: float = 0.0  # how many there are

    def forward(self, stage: int, batch: int) -> None:
        rows = self.pieces[batch]
        labels = float(self.engine.objective.weight(rows))
        if labels:
            self.total += float(self.engine.loss(rows, step=0, key=0)) * labels
            self.weight += labels

    def backward(self, stage: int, batch: int) -> None:
        raise AssertionError("an evaluation has no backward")

    def reduce(self, stage: int) -> None:
        raise AssertionError("an evaluation has no gradients")
