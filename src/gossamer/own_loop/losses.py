"""Hook of `torch.autograd.backward`: reads the losses of a backward pass before the pass frees their saved tensors.

`loss.backward()` calls `torch.autograd.backward`, the one place where a loss and its graph are still complete. The
function is replaced once per process by one that records its arguments while the original runs. A backward pass that
reaches the engine another way is averaged all the same, but its loss denominator is unknown.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.loss_reader.count import BatchRows, Kind, LossCount, read


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """A call of backward: its loss tensors, and the gradients that were passed with them."""

    roots: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    def counted(self, batch: BatchRows) -> LossCount:
        """Return the losses' denominators. Call it before the pass runs, which frees the saved tensors."""
        try:
            return read(self.roots, self.gradients, batch)
        except RuntimeError as error:  # graph freed: torch itself refuses a second pass
            return LossCount(Kind.UNKNOWN, said=str(error).splitlines()[0])


class LossRoots:
    """The registry of callbacks that run before every outermost `torch.autograd.backward` of this process.

    `running`: how many of these run now, on any thread.
    """

    def __init__(self) -> None:
        self.running = 0
        self._lookers: list[Callable[[BackwardCall], None]] = []
        self._depth = threading.local()

    def look(self, looker: Callable[[BackwardCall], None]) -> Callable[[], None]:
        """Register `looker` for every outermost backward call; return a function that unregisters it."""
        self._lookers.append(looker)
        return lambda: self._lookers.remove(looker) if looker in self._lookers else None

    @contextmanager
    def told(self, tensors: Any, grad_tensors: Any, grad_variables: Any) -> Iterator[None]:
        """Call the registered callbacks on entry, unless the call is nested in another backward pass."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        self.running += depth == 0
        try:
            if depth == 0 and self._lookers:  # a nested call is activation checkpointing, not a loss
                roots = tuple(one for one in _sequence(tensors) if isinstance(one, Tensor))
                given = grad_tensors if grad_tensors is not None else grad_variables
                gradients = tuple(_sequence(given)) if given is not None else (None,) * len(roots)
                for looker in list(self._lookers):
                    looker(BackwardCall(roots, gradients))
            yield
        finally:
            self._depth.value = depth
            self.running -= depth == 0


@functools.cache
def watched() -> LossRoots:
    """Return the process's registry of backward callbacks. The first call replaces `torch.autograd.backward`."""
    roots, original = LossRoots(), torch.autograd.backward

    @functools.wraps(original)
    def backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        with roots.told(tensors, grad_tensors, grad_variables):
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    torch.autograd.backward = backward
    return roots


def _sequence(given: Any) -> Sequence[Any]:
    return (given,) if isinstance(given, Tensor) or given is None else tuple(given)
