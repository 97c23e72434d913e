"""The vectors of a step's linear layers, as means over ranks, for optimizers that are made of them (Eva)."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome
from gossamer.model.layer_vectors import LayerHooks
from gossamer.optimizer import LayerVectors
from gossamer.spec.errors import bad_input
from gossamer.sync import GradientReducer, StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVectors:
    """The vectors of one rank's steps, with those of all other ranks. Without layers, as for most optimizers: nothing.

    Equations: input = sum of inputs / positions, over the positions of all ranks; output = sum over ranks of
    share * gradient, with the shares that the ranks' gradients have in their mean.
    Wire: one sum of inputs + outputs + 1 numbers per layer, in float32.
    """

    hooks: LayerHooks
    pump: CommThread
    replica: GradientReducer

    def open(self) -> AbstractContextManager[None]:
        """Take the vectors of the micro-batches that run inside the context, in place of those before."""
        return self.hooks.open()

    def mean(self, window: StepContext, moved: Collection[str]) -> dict[str, LayerVectors]:
        """Return the vectors by name of the weight, the same on all ranks whose gradients are averaged.

        All of them must call it. `moved`: parameters that have a gradient. Raises BadInput for one whose layer has a
        gradient and was never called, as where a model uses its weight itself.
        """
        if not self.hooks.sums:
            return {}
        share = float(self.replica.shares()[self.replica.rank]) / window.scale
        parts = [p for one in self.hooks.sums.values() for p in (one.input, one.output * share, one.positions[None])]
        step = self.pump.begin((1,))
        step.submit(0, _summed(torch.cat(parts), window.level))
        flat = torch.split(step.result(0).mean, [part.numel() for part in parts])
        found = {}
        for name, inputs, output, positions in zip(self.hooks.sums, flat[::3], flat[1::3], flat[2::3], strict=True):
            if float(positions):
                found[name] = LayerVectors(inputs / positions, output)
        unseen = [name for name in self.hooks.sums if name in moved and name not in found]
        if unseen:
            raise bad_input(
                wanted="linear layers that the model calls, as the optimizer needs their inputs",
                got=f"gradients of {len(unseen)} that it does not call, such as {unseen[0]}",
                do="add their names to `plain` of train.optimizer: they then follow their gradients",
                key="train.optimizer",
            )
        return found


def _summed(flat: Tensor, level: str) -> Generator[Message, tuple[Tensor, ...], Outcome]:
    (total,) = yield Message((flat,), Collective.SUM, level)
    return Outcome(total, None, ExchangeState())
