"""Who asked for the backward pass that runs: its losses, before it frees what they remember.

`torch.autograd.backward` is what `loss.backward()` calls, and the one place where a loss and its graph are still
whole. It is replaced, once in a process, by a function that keeps what it is given while the original runs. Nothing
else of it changes. A backward pass that reaches the engine another way is exchanged all the same; only what its loss
counts is not known then.
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
    """A call of backward: its losses, and the gradients that were given with them."""

    roots: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    def counted(self, batch: BatchRows) -> LossCount:
        """What its losses count. Only before the pass has run, as it frees what they remember."""
        try:
            return read(self.roots, self.gradients, batch)
        except RuntimeError as error:  # freed already: a second pass through one graph, which torch will refuse itself
            return LossCount(Kind.UNKNOWN, said=str(error).splitlines()[0])


class LossRoots:
    """Those who look at every call of backward in this process, before it runs."""

    def __init__(self) -> None:
        self._lookers: list[Callable[[BackwardCall], None]] = []
        self._depth = threading.local()

    def look(self, looker: Callable[[BackwardCall], None]) -> Callable[[], None]:
        """From now on `looker` is told of every outermost call; gives back what ends that."""
        self._lookers.append(looker)
        return lambda: self._lookers.remove(looker) if looker in self._lookers else None

    @contextmanager
    def told(self, tensors: Any, grad_tensors: Any, grad_variables: Any) -> Iterator[None]:
        """Around one call."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        try:
            if depth == 0 and self._lookers:  # a nested one is a checkpoint's, whose loss is nobody's
                roots = tuple(one for one in _sequence(tensors) if isinstance(one, Tensor))
                given = grad_tensors if grad_tensors is not None else grad_variables
                gradients = tuple(_sequence(given)) if given is not None else (None,) * len(roots)
                for looker in list(self._lookers):
                    looker(BackwardCall(roots, gradients))
            yield
        finally:
            self._depth.value = depth


@functools.cache
def watched() -> LossRoots:
    """The process's lookers; the first call puts them before `torch.autograd.backward`."""
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
