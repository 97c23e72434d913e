"""A micro-batch on its way through a stage, from its forward to the end of its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.model.split.backward_python import BackwardWrapper
from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.saved_copies import refused_by_name
from gossamer.model.split.split_backward import Later, backward_input


@dataclass(slots=True)
class InFlight:
    """A micro-batch between its forward and its backward on one stage."""

    received: dict[CallOutput, Tensor]  # leaves; those of `needs_grad` gather gradients
    sent: dict[CallOutput, Tensor]
    result: Any = None  # what `run` returned, on the last stage
    again: Callable[[], InFlight] | None = None  # set where no graph was kept
    later: Later | None = None  # between the two parts of a backward
    around: BackwardWrapper | None = None  # its backward, where code of the model's own runs in that

    def backward(
        self, gradients: Mapping[CallOutput, Tensor], *, loss: Tensor | None = None
    ) -> dict[CallOutput, Tensor]:
        """Add the parameters' gradients, given those of what was sent (or the loss, on the last stage).

        Returns the gradients of what was received; a value that nothing depended on has none.
        """
        tensors, grads = self._roots(gradients, loss)
        if tensors:
            with refused_by_name(), self._around(is_split=False):
                torch.autograd.backward(tensors, grads)
        return {v: x.grad for v, x in self.received.items() if x.grad is not None}

    def backward_input(
        self, gradients: Mapping[CallOutput, Tensor], *, loss: Tensor | None = None
    ) -> dict[CallOutput, Tensor]:
        """What `backward` returns, without the parameters' gradients, as far as that saves work (see split.py).

        Until `backward_weight` nothing may write to the tensors given and returned. Both run under the forward's key.
        """
        with refused_by_name(), self._around(is_split=True):
            self.later = backward_input(*self._roots(gradients, loss), list(self.received.values()))
        found = {v: x.grad for v, x in self.received.items() if x.grad is not None}
        self.received, self.sent, self.result = {}, {}, None  # else they would hold the graph
        return found

    def backward_weight(self) -> None:
        """Add the parameters' gradients that `backward_input` left, and free the graph."""
        assert self.later is not None, "the backward of the weights comes after that of the inputs"
        later, self.later = self.later, None
        with refused_by_name(), self._around(is_split=True):
            later.run()

    def recompute(self) -> None:
        """Build the graph, and `result` anew, of a forward that did not keep it, from what was received.

        `sent` is the same once more, not to be sent. The closure of the forward is called again, under its own key.
        """
        assert self.again is not None, "the graph is there"
        live = self.again()
        self.received, self.sent, self.result, self.again = live.received, live.sent, live.result, None
        self.around = live.around

    def _around(self, *, is_split: bool) -> AbstractContextManager[None]:
        return self.around(is_split) if self.around is not None else nullcontext()

    def _roots(self, gradients: Mapping[CallOutput, Tensor], loss: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        assert self.again is None, "a forward that kept no graph needs recompute before its backward"
        roots = [(self.sent[v], g) for v, g in gradients.items() if self.sent[v].requires_grad]
        if loss is not None and loss.requires_grad:
            roots.append((loss, torch.ones_like(loss)))
        return [t for t, _ in roots], [g for _, g in roots]
