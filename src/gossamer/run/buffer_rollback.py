"""Rollback of a model's buffers: what an attempt at a step has changed is undone, if it is rejected or made again.

All buffers are copied before the first attempt. From then on the copies of a module's buffers are refreshed only if an
attempt has changed one of them, by what torch counts as a write or by value. So a model whose forwards change no buffer
pays for a look at the versions alone.
Memory: a copy of the buffers of modules that change theirs, and of other buffers of up to `SMALL_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.model.quantized_linear import quantized_layers
from gossamer.model.split.absent_tensor import AbsentTensor

SMALL_BYTES = 65_536  # unchanged buffers up to this size stay copied: a later attempt may be the first to change them

Space = dict[str, Tensor | None]  # the buffers of one module, as torch holds them


@dataclass(slots=True)
class _Kept:
    """A buffer before an attempt. `value`: its copy; None where it has no data here, or is too large to stay copied."""

    tensor: Tensor | None
    version: int = 0
    value: Tensor | None = None

    @staticmethod
    def of(tensor: Tensor | None) -> _Kept:
        if tensor is None or isinstance(tensor, AbsentTensor):
            return _Kept(tensor)
        return _Kept(tensor, _version(tensor), tensor.detach().clone())

    def is_written(self) -> bool:
        """Return whether torch has counted a write to the tensor."""
        held = self.tensor
        return held is not None and not isinstance(held, AbsentTensor) and _version(held) != self.version

    def fits(self, now: Tensor | None) -> bool:
        """Return whether the memory of the copy can take the values of `now`."""
        return now is not None and self.value is not None and _form(now) == _form(self.value)

    def differs(self) -> bool:
        """Return whether the values are others than those of the copy; nan equals nothing."""
        held, was = self.tensor, self.value
        return held is not None and was is not None and not (self.fits(held) and torch.equal(held, was))

    def put_back(self) -> None:
        """Restore the values."""
        held, was = self.tensor, self.value
        if held is None or was is None:
            return
        if self.fits(held):
            held.data.copy_(was)
        else:
            held.data = was.clone()
        self.version = _version(held)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a kind without memory of its own
        return 0


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


@dataclass(slots=True)
class _Owner:
    """The buffers of one module. `changes`: whether an attempt has changed one; then all are copied before each."""

    path: str
    space: Space
    changes: bool = False
    kept: dict[str, _Kept] = field(default_factory=dict)

    def is_touched(self) -> bool:
        """Return whether a buffer has been replaced, added, removed or, as far as torch counts that, written."""
        if self.space.keys() != self.kept.keys():
            return True
        return any(self.space[name] is not one.tensor or one.is_written() for name, one in self.kept.items())

    def keep(self) -> None:
        """Copy the present buffers, into the memory of earlier copies where that fits."""
        into: list[Tensor] = []
        values: list[Tensor] = []
        for name in self.kept.keys() - self.space.keys():
            del self.kept[name]
        for name, now in self.space.items():
            one = self.kept.get(name)
            if one is None or now is None or isinstance(now, AbsentTensor) or not one.fits(now):
                self.kept[name] = _Kept.of(now)
                continue
            assert one.value is not None
            one.tensor, one.version = now, _version(now)
            into.append(one.value)
            values.append(now.detach())
        if into:
            torch._foreach_copy_(into, values)

    def put_back(self) -> Iterator[str]:
        """Restore the buffers, and yield the names of those that cannot be."""
        prefix = f"{self.path}." if self.path else ""
        if not self.changes:
            for name, one in self.kept.items():
                if one.differs():  # since when is not known
                    self.changes = True
                    yield prefix + name
            return
        for name, one in self.kept.items():
            if one.value is None and one.is_written():
                yield prefix + name
            one.put_back()
        if [*map(id, self.space.values())] != [id(one.tensor) for one in self.kept.values()]:
            self.space.clear()
            self.space.update({name: one.tensor for name, one in self.kept.items()})

    def memories(self) -> Iterator[int]:
        """Yield the addresses of the buffers' memory."""
        for held in self.space.values():
            if held is not None and not isinstance(held, AbsentTensor) and (memory := _memory(held)):
                yield memory


@dataclass(slots=True)
class BufferRollback:
    """The buffers of this rank's model as they were before the attempt that is being made."""

    owners: tuple[_Owner, ...]
    _is_first: bool = True  # the first attempt is still to come
    _is_settled: bool = False

    @staticmethod
    def of(module: nn.Module, others: Iterable[Space] = ()) -> BufferRollback:
        """Return the rollback of the buffers of `module`, and of `others` that change with them.

        The weights of a quantized base are left out: no forward changes them.
        """
        frozen = {id(m) for layer in quantized_layers(module).values() for m in layer.modules()}
        own = (_Owner(path, m._buffers) for path, m in module.named_modules() if id(m) not in frozen)
        return BufferRollback((*own, *(_Owner("", space) for space in others)))

    @torch.no_grad()
    def keep(self) -> None:
        """Begin an attempt: keep the buffers as they are now."""
        if self._is_first:
            self._is_first = False
            for one in self.owners:
                one.keep()
            return
        self._settle()
        self._see()
        for one in self.owners:
            if one.changes:
                one.keep()

    @torch.no_grad()
    def put_back(self) -> tuple[str, ...]:
        """Restore the buffers of the attempt's beginning; return the names of those that cannot be.

        These are large ones that no attempt had changed before, and those that were first changed in a way that torch
        does not count (`.data`) after the first attempt.
        """
        self._settle()
        self._see()
        return tuple(name for one in self.owners for name in one.put_back())

    def _settle(self) -> None:
        """Look once at what the first attempt has changed, and drop large copies that nothing was found to need."""
        if self._is_settled:
            return
        self._is_settled = True
        for one in self.owners:
            one.changes = one.is_touched() or any(kept.differs() for kept in one.kept.values())
        self._spread()
        for one in self.owners:
            for kept in one.kept.values():
                if not one.changes and kept.value is not None and kept.value.nbytes > SMALL_BYTES:
                    kept.value = None

    def _see(self) -> None:
        """Look at what an attempt has changed for the first time."""
        found = [one for one in self.owners if not one.changes and one.is_touched()]
        for one in found:
            one.changes = True
        if found:
            self._spread()

    def _spread(self) -> None:
        """Count as changing whoever holds memory of one that changes: a write under one name may show in another."""
        changing = {memory for one in self.owners if one.changes for memory in one.memories()}
        for one in self.owners:
            one.changes = one.changes or not changing.isdisjoint(one.memories())
