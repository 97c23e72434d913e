"""Copies of tensors, to compare or restore their values after a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.split.trace_backends import written


@dataclass
class Copies:
    """The copies of tensors, made at once (`make`) or each right before its memory is first written (`watching`)."""

    tensors: Sequence[Tensor]
    _copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def make(self) -> None:
        """Copy all of the tensors now."""
        for tensor in self.tensors:
            self._copy(tensor)

    def _copy(self, tensor: Tensor) -> None:
        try:
            alias = tensor.detach()
            self._copies.setdefault(id(tensor), (alias, alias.clone()))
        except (RuntimeError, NotImplementedError):  # a kind of tensor without memory of its own
            return

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of a tensor; None if there is none."""
        found = self._copies.get(id(tensor))
        return None if found is None else found[1]

    def differ(self) -> bool:
        """Return whether a tensor has other values than its copy."""
        copied = ((x, self._copies[id(x)][1]) for x in self.tensors if id(x) in self._copies)
        return any(x.shape != was.shape or not torch.equal(x, was) for x, was in copied)

    def watching(self) -> TorchDispatchMode:
        """Return a mode that copies a tensor right before an operator writes to it."""
        return _BeforeWrites(self.tensors, self._copy)

    def put_back(self) -> None:
        """Restore the values of the tensors that differ from their copies."""
        with torch.no_grad():
            for alias, was in self._copies.values():
                if not torch.equal(alias, was):
                    alias.data.copy_(was)
        self._copies.clear()


class _BeforeWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor], copy_of: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copy = copy_of
        self._known: dict[int, list[Tensor]] = {}  # memory -> tensors in it
        for tensor in tensors:
            self._known.setdefault(_memory(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key in {_memory(x) for x in _changed(func, args, kwargs or {})} & self._known.keys():
            for tensor in self._known.pop(key):
                self._copy(tensor)
        return func(*args, **(kwargs or {}))


def _changed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Return the tensors that an operator may write to.

    For custom operators and batch norms these are all arguments, as their schema need not name them.
    """
    if not hasattr(func, "_schema") or func.namespace != "aten" or "batch_norm" in func.name():
        return (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    return written(func, args, kwargs) if func._schema.is_mutable else iter(())


def _memory(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0
