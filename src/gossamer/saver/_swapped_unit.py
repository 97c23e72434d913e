"""The forward of a unit whose saved tensors go to a store, and come back for its backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from gossamer.model.unit_forward import UnitForward
from gossamer.saver._swap_store import Swapped, SwapStore, check_unwritten


class SavedTensors(Protocol):
    """A place for what a unit saves. `keys`: of the storages of its parameters and buffers, which stay."""

    @property
    def put_bytes(self) -> int:
        """Return the bytes that have gone since the start."""

    @property
    def waited_s(self) -> float:
        """Return the seconds that were waited since the start."""

    def pack(self, tensor: Tensor, keys: frozenset[int]) -> Any:
        """Take a tensor that autograd saves, and return what autograd keeps in place of it."""

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor again."""


class SwappedUnit(UnitForward):
    """The forward of `unit`. It remembers the seconds that it last computed, without waits, and the bytes that went."""

    def __init__(self, unit: nn.Module, saved: SavedTensors) -> None:
        self._saved = saved
        self.seconds, self.size_bytes = 0.0, 0
        super().__init__(unit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.unit.training:
            return self.real(*args, **kwargs)
        keys = frozenset(_key(one) for one in (*self.unit.parameters(), *self.unit.buffers()))
        saved = self._saved
        began, waited_s, put_bytes = time.perf_counter(), saved.waited_s, saved.put_bytes
        with saved_tensors_hooks(lambda tensor: saved.pack(tensor, keys), saved.unpack):
            output = self.real(*args, **kwargs)
        self.seconds = time.perf_counter() - began - (saved.waited_s - waited_s)
        self.size_bytes = saved.put_bytes - put_bytes
        return output


class Kept:
    """A saved tensor that stays in memory. A parameter is kept as itself, so that its memory may come and go."""

    __slots__ = ("tensor", "version", "watch")

    def __init__(self, tensor: Tensor) -> None:
        is_plain = type(tensor) is Tensor or isinstance(tensor, FakeTensor)
        self.tensor = tensor.detach() if is_plain else tensor  # a graph must not hold its own output
        self.watch, self.version = tensor, tensor._version
        if is_plain:
            self.watch = self.tensor

    def again(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it has been written to."""
        check_unwritten(self.watch, self.version)
        return self.tensor


class ToStore:
    """Saved tensors in a store, but for those of less than `least` bytes, and weights and buffers."""

    def __init__(self, store: SwapStore, least: int) -> None:
        self._store, self._least = store, least

    @property
    def put_bytes(self) -> int:
        return self._store.put_bytes

    @property
    def waited_s(self) -> float:
        return self._store.waited_s

    def pack(self, tensor: Tensor, keys: frozenset[int]) -> Swapped | Kept:
        """Take a tensor that autograd saves, and return what autograd keeps in place of it."""
        return self._store.put(tensor) if _can_go(tensor, keys, self._least) else Kept(tensor)

    def unpack(self, kept: Swapped | Kept) -> Tensor:
        """Return the tensor again."""
        return kept.again() if isinstance(kept, Kept) else self._store.get(kept)


class ToNowhere:
    """The same on shapes alone: what goes takes no memory until backward, but for the last `host` bytes of it."""

    def __init__(self, host: int, least: int) -> None:
        self._host, self._least = host, least
        self._recent: dict[int, Tensor] = {}
        self._there = 0
        self.put_bytes, self.waited_s = 0, 0.0

    def pack(self, tensor: Tensor, keys: frozenset[int]) -> Callable[[], Tensor]:
        """Take a tensor that autograd saves, and return what makes one of its shape."""
        if not _can_go(tensor, keys, self._least):
            kept = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
            return lambda: kept
        key = _key(tensor)
        if key not in self._recent:
            self._recent[key] = tensor.detach()
            self._there += tensor.untyped_storage().nbytes()
            self.put_bytes += tensor.untyped_storage().nbytes()
        while self._there > self._host:
            self._there -= self._recent.pop(next(iter(self._recent))).untyped_storage().nbytes()
        seed, shape, stride = tensor.new_empty(0), tensor.shape, tensor.stride()
        return lambda: seed.new_empty_strided(shape, stride)

    def unpack(self, kept: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the same shape."""
        return kept()


def _can_go(tensor: Tensor, keys: frozenset[int], least: int) -> bool:
    """Return whether a saved tensor is an activation in memory of its own, of `least` bytes or more."""
    if not (type(tensor) is Tensor or isinstance(tensor, FakeTensor)) or isinstance(tensor._base, nn.Parameter):
        return False
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return tensor.untyped_storage().nbytes() >= least and _key(tensor) not in keys


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
