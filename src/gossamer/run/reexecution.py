"""What the work of a rank in a step comes to, in a few numbers: its own as it was sent, another's done once more.

Data parallel replicas hold the same parameters at the start of a step, and which samples a replica computes on is a
function of seed, step and replica: so every rank can do the work of any other, and nothing has to be sent for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.model.side_effects import untouched
from gossamer.ops.fingerprint import projected
from gossamer.run.batches import Feed, moved
from gossamer.run.step_runner import ModelRuntime

WIDTH = 64
ROW = 3 + WIDTH  # loss, valid labels, norm of the gradient, its projections


@dataclass(frozen=True, slots=True)
class Reexecution:
    """One rank's. Nothing of the trainer's is changed: gradients, what the model keeps and random numbers are as they
    were.
    """

    engine: ModelRuntime
    feed: Feed
    params: Mapping[str, Tensor]

    def row(self, loss: float, labels: float, gradients: Mapping[str, Tensor], seed: int) -> Tensor:
        """(ROW,) float64 of work whose gradient is known."""
        said = torch.tensor([loss, labels], dtype=torch.float64)
        return torch.cat([said, projected((gradients[n] for n in self.params), seed, width=WIDTH)])

    def redo(self, step: int, replica: int, seed: int, *, scale: float = 1.0, threads: int = 0) -> Tensor:
        """(ROW,) of the work of `replica` in `step`, from the parameters as they are now."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            with untouched(self.engine.module):
                return self._redone(step, replica, seed, scale)
        finally:
            torch.set_num_threads(before)

    def _redone(self, step: int, replica: int, seed: int, scale: float) -> Tensor:
        pieces = replace(self.feed, replica=replica, only=None).fetch(step)
        for piece in pieces.values():
            piece.rows.update(moved(piece.rows, self.engine.device))
        labels = {n: float(self.engine.objective.weight(piece.rows)) for n, piece in pieces.items()}
        total, mean = sum(labels.values()), 0.0
        sums = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for number, piece in pieces.items():
            part = labels[number] / total if total else 0.0
            loss = self.engine.loss(piece.rows, step=step, key=piece.key)
            mean += float(loss.detach()) * part if part else 0.0
            scaled = loss * (part * scale) if part else torch.nan_to_num(loss) * 0.0
            with self.engine.randomness.at(step, piece.key):
                found = torch.autograd.grad(scaled, list(self.params.values()), allow_unused=True)
            for name, gradient in zip(self.params, found, strict=True):
                if gradient is not None:
                    sums[name].add_(gradient)
        for gradient in sums.values():
            gradient.div_(scale)
        return self.row(mean, total, sums, seed)
