"""Fingerprint the gradient of a rank in a step: its own as it was sent, or another rank's by re-execution.

Data-parallel replicas hold the same parameters at the start of a step, and the samples of a replica are a function of
seed, step and replica. So every rank can redo the work of any other without receiving any data.
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
    """The re-execution of gradients on one rank.

    It leaves the trainer's state unchanged: gradients, buffers of the model and random numbers.
    """

    engine: ModelRuntime
    feed: Feed
    params: Mapping[str, Tensor]

    def row(self, loss: float, labels: float, gradients: Mapping[str, Tensor], seed: int) -> Tensor:
        """Return the fingerprint, (ROW,) float64, of work whose gradients are known."""
        said = torch.tensor([loss, labels], dtype=torch.float64)
        return torch.cat([said, projected((gradients[n] for n in self.params), seed, width=WIDTH)])

    def redo(self, step: int, replica: int, seed: int, *, scale: float = 1.0, threads: int = 0) -> Tensor:
        """Return the fingerprint, (ROW,) float64, of the work of `replica` in `step`, from the current parameters.

        `scale`: the loss scale; `threads`: compute threads to use, 0 for as many as now.
        """
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
