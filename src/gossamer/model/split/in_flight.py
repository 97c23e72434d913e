"""A micro-batch in flight on a stage, from its forward to the end of its backward."""

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

    received: dict[CallOutput, Tensor]  # leaves; those with `needs_grad` accumulate gradients
    sent: dict[CallOutput, Tensor]
    result: Any = None  # what `run` returned, on the last stage
    again: Callable[[], InFlight] | None = None  # set where no graph was kept
    later: Later | None = None  # between the two parts of a backward
    around: BackwardWrapper | None = None  # wraps the backward, if model code runs in it

    def backward(
        self, gradients: Mapping[CallOutput, Tensor], *, loss: Tensor | None = None
    ) -> dict[CallOutput, Tensor]:
        """Accumulate parameter gradients, given the gradients of the sent tensors (or the loss, on the last stage).

        Returns the gradients of the received tensors; a tensor that nothing depends on has none.
        """
        tensors, grads = self._roots(gradients, loss)
        if tensors:
            # A whole model's backward follows its forward: what was written in place is an error of its own code.
            is_whole = not self.received and not self.sent
            with nullcontext() if is_whole else refused_by_name(), self._around(is_split=False):
                torch.autograd.backward(tensors, grads)
        return {v: x.grad for v, x in self.received.items() if x.grad is not None}

    def backward_input(
        self, gradients: Mapping[CallOutput, Tensor], *, loss: Tensor | None = None
    ) -> dict[CallOutput, Tensor]:
        """Return what `backward` returns, and defer the parameter gradients where that saves work.

        See `split_backward.py`. Until `backward_weight` nothing may write to the tensors given and returned. Run both
        under the random key of the forward (`UnitSeeds.at`).
        """
        with refused_by_name(), self._around(is_split=True):
            self.later = backward_input(*self._roots(gradients, loss), list(self.received.values()))
        found = {v: x.grad for v, x in self.received.items() if x.grad is not None}
        self.received, self.sent, self.result = {}, {}, None  # else they would hold the graph
        return found

    def backward_weight(self) -> None:
        """Accumulate the parameter gradients that `backward_input` deferred, and free the graph."""
        assert self.later is not None, "the backward of the weights comes after that of the inputs"
        later, self.later = self.later, None
        with refused_by_name(), self._around(is_split=True):
            later.run()

    def recompute(self) -> None:
        """Rebuild the graph and `result` of a forward that kept no graph, from the received tensors.

        `sent` is rebuilt too, and not to be sent again. The closure of the forward is called again: run it under the
        random key of that forward.
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
