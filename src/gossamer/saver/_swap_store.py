"""Storages that autograd has saved, on their way to a file and back, within a limit of memory.

A thread writes what `put` was given, in its order; until then the storage itself is held. What backward asks for while
it is still held is not read: its memory is handed out, and a write that has not begun is left out. Otherwise it is read
back, page-aligned, so that kernels see the alignment that the allocator gives. Each storage that backward asks for has
those saved before it read ahead by another thread, nearest first, as far as the limit allows.

`host` counts what is in flight: a staging buffer, storages that wait to be written, and those read ahead. What has been
handed to backward is its working memory, as in plain training, and no longer counted.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gossamer.sharding import TierAccount
from gossamer.spec.errors import BadInput, RunFailed, bad_input
from gossamer.spec.units import show_bytes
from gossamer.store.tier_file import TierFile, page_buffer, paged

_KEY = "plan.savers.activation_swap"
_STAGING_BYTES = 1 << 20
_SLICE_S = 0.05


class _At(Enum):
    """The place of a storage; `USED`: handed to backward."""

    HELD = "held"
    AWAY = "away"
    READING = "reading"
    AHEAD = "ahead"
    USED = "used"


class _Record:
    """A saved storage. `memory`: its bytes, uint8, where they are in memory; `dead`: takes what is to be freed."""

    __slots__ = ("__weakref__", "at", "dead", "memory", "number", "size_bytes", "start", "storage", "version")

    def __init__(self, number: int, tensor: Tensor, start: int, dead: deque[tuple[int, int, int]]) -> None:
        storage = tensor.untyped_storage()
        self.number, self.size_bytes, self.start = number, storage.nbytes(), start
        self.version = tensor._version
        self.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # its address is not used again
        self.memory: Tensor | None = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        self.at, self.dead = _At.HELD, dead

    @property
    def pages_bytes(self) -> int:
        return paged(self.size_bytes)

    def __del__(self) -> None:
        ahead = self.pages_bytes if self.at is _At.AHEAD else 0
        self.dead.append((self.start, self.pages_bytes, ahead))  # any thread may run this: nothing is locked here


class Swapped:
    """A saved tensor as autograd keeps it: its storage's record, and where in it the tensor lies."""

    __slots__ = ("dtype", "offset", "record", "shape", "stride", "version", "watch")

    def __init__(self, record: _Record, tensor: Tensor) -> None:
        self.record, self.dtype = record, tensor.dtype
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.watch, self.version = version_watch(tensor), tensor._version


def version_watch(tensor: Tensor) -> Tensor:
    """Return a tensor without memory whose version is that of `tensor`, for as long as anybody writes to it."""
    watch = tensor.detach()
    watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return watch


def check_unwritten(watch: Tensor, version: int) -> None:
    """Raise autograd's error if a saved tensor has been written to: it does not look where hooks are."""
    if watch._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"saved for backward is at version {watch._version}; expected version {version} instead"
        )


@dataclass(slots=True)
class _Extents:
    """The free parts of a file, by their start."""

    free: list[tuple[int, int]]  # (start, end)

    def take(self, count: int) -> int | None:
        """Return where the first free part of so many bytes starts, and take it; None: there is none."""
        for place, (start, end) in enumerate(self.free):
            if end - start >= count:
                self.free[place : place + 1] = [(start + count, end)] if end - start > count else []
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Free a part again, together with free neighbors."""
        place = bisect_left(self.free, (start, start))
        low, high, end = place, place, start + count
        if place and self.free[place - 1][1] == start:
            low, start = place - 1, self.free[place - 1][0]
        if place < len(self.free) and self.free[place][0] == end:
            high, end = place + 1, self.free[place][1]
        self.free[low:high] = [(start, end)]


@dataclass(slots=True, eq=False)
class SwapStore:
    """What a rank has swapped, and the two threads that move it. `file`: open, and of the size of its limit."""

    file: TierFile
    host: TierAccount
    put_bytes: int = 0  # of storages since the start, each counted once
    written_bytes: int = 0
    read_bytes: int = 0
    waited_s: float = 0.0  # seconds that forward and backward waited for the file
    is_closed: bool = False
    _extents: _Extents = field(default_factory=lambda: _Extents([]))
    _known: dict[int, weakref.ref[_Record]] = field(default_factory=dict)  # by the address of the storage
    _order: list[tuple[int, weakref.ref[_Record]]] = field(default_factory=list)
    _dead: deque[tuple[int, int, int]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _error: BaseException | None = None
    _count: int = 0
    _staging: Tensor = field(default_factory=lambda: page_buffer(_STAGING_BYTES))
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gossamer-swap-write"))
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gossamer-swap-read"))

    @staticmethod
    def of(file: TierFile, host: TierAccount) -> SwapStore:
        """Return an empty store. Raises BadInput where `host` has no room for the staging buffer."""
        if not host.try_take(_STAGING_BYTES):
            raise _too_small(host, 0)
        found = SwapStore(file, host)
        found._extents.give(0, file.size_bytes)
        return found

    def __deepcopy__(self, _: Any) -> SwapStore:
        return self  # a copy of the module swaps to the same file

    def put(self, tensor: Tensor) -> Swapped:
        """Take a tensor that autograd saves. Raises BadInput for a limit that is too small, RunFailed for the disk."""
        self._reclaim()
        key = int(tensor.untyped_storage()._cdata)
        known = self._known.get(key, _nothing)()
        if known is None or known.version != tensor._version:
            known = self._new(tensor)
            self._known[key] = weakref.ref(known)
        return Swapped(known, tensor)

    def _new(self, tensor: Tensor) -> _Record:
        size = tensor.untyped_storage().nbytes()
        if size + _STAGING_BYTES > self.host.limit:
            raise _too_small(self.host, size)
        self._wait_for_room(size)
        start = self._extents.take(paged(size))
        if start is None:
            self.host.give(size)
            raise self._full(size)
        record = _Record(self._count, tensor, start, self._dead)
        self._order.append((record.number, weakref.ref(record)))
        self._count += 1
        self.put_bytes += size
        self._writer.submit(self._write, record)
        return record

    def get(self, swapped: Swapped) -> Tensor:
        """Return a tensor that autograd asks for, and read ahead those saved before it."""
        check_unwritten(swapped.watch, swapped.version)
        record = swapped.record
        self._use(record)
        self._read_ahead(record.number)
        assert record.memory is not None
        tensor = torch.empty(0, dtype=swapped.dtype)
        storage = record.memory.untyped_storage()
        return tensor.set_(storage, swapped.offset, swapped.shape, swapped.stride)  # type: ignore[call-overload, no-any-return]

    def _use(self, record: _Record) -> None:
        """Have a record in memory, and count it as handed out."""
        began = time.perf_counter()
        with self._changed:
            while record.at is _At.READING:
                self._check()
                self._changed.wait(_SLICE_S)
            self._check()
            before, record.at = record.at, _At.USED
        if before is _At.HELD:
            self.host.give(record.size_bytes)
        elif before is _At.AHEAD:
            self.host.give(record.pages_bytes)
        elif before is _At.AWAY:
            record.memory = self._read(record)
        if before is not _At.HELD:
            self.waited_s += time.perf_counter() - began

    def _read_ahead(self, number: int) -> None:
        """Start to read the records saved before `number`, nearest first, while there is room."""
        self._reclaim()
        for _, ref in reversed(self._order[: bisect_left(self._order, number, key=lambda one: one[0])]):
            record = ref()
            if record is None or record.at is not _At.AWAY:
                continue
            if not self.host.try_take(record.pages_bytes):
                return
            record.at = _At.READING
            self._reader.submit(self._fetch, record)

    def _fetch(self, record: _Record) -> None:
        try:
            memory = self._read(record)
        except BaseException as error:
            self._failed(error)
            return
        with self._changed:
            record.memory, record.at = memory, _At.AHEAD
            self._changed.notify_all()

    def _read(self, record: _Record) -> Tensor:
        buffer = page_buffer(record.pages_bytes)
        self.file.read(record.start, buffer)
        self.read_bytes += record.pages_bytes
        return buffer

    def _write(self, record: _Record) -> None:
        try:
            memory = record.memory if record.at is _At.HELD else None
            if memory is None:
                return
            for at in range(0, record.size_bytes, _STAGING_BYTES):
                part = memory[at : at + _STAGING_BYTES]
                self._staging[: len(part)].copy_(part)
                self.file.write(record.start + at, self._staging[: paged(len(part))])
            self.written_bytes += record.pages_bytes
            with self._changed:
                if record.at is not _At.HELD:  # backward was faster
                    return
                record.memory, record.at = None, _At.AWAY
                memory = None
                self.host.give(record.size_bytes)
                self._changed.notify_all()
        except BaseException as error:
            self._failed(error)

    def _wait_for_room(self, size: int) -> None:
        began = time.perf_counter()
        while not self.host.try_take(size):
            self._reclaim()
            with self._changed:
                self._check()
                if not self._drop_ahead():
                    self._changed.wait(_SLICE_S)
        self.waited_s += time.perf_counter() - began

    def _drop_ahead(self) -> bool:
        """Let go of the record read ahead that is needed last; return whether there was one."""
        for _, ref in self._order:
            record = ref()
            if record is not None and record.at is _At.AHEAD:
                record.memory, record.at = None, _At.AWAY
                self.host.give(record.pages_bytes)
                return True
        return False

    def _reclaim(self) -> None:
        """Free the parts of the file whose records nobody keeps any longer."""
        while self._dead:
            start, count, ahead = self._dead.popleft()
            self._extents.give(start, count)
            self.host.give(ahead)
        while self._order and self._order[-1][1]() is None:
            self._order.pop()
        if len(self._order) > 2 * len(self._known) + 64:
            self._order = [one for one in self._order if one[1]() is not None]
        if len(self._known) > 2 * len(self._order) + 64:
            self._known = {key: ref for key, ref in self._known.items() if ref() is not None}

    def _full(self, size: int) -> BadInput:
        used = self.file.size_bytes - sum(end - start for start, end in self._extents.free)
        least = used + paged(size)
        return bad_input(
            wanted=f"more than {least} bytes ({show_bytes(least)}) for what the units of a micro-batch save",
            got=f"{self.file.size_bytes} bytes ({show_bytes(self.file.size_bytes)}), {used} of them used",
            do="raise file, or train.accumulate, which makes micro-batches smaller",
            key=f"{_KEY}.file",
        )

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise RunFailed(f"activation_swap: {self.file.path}: {self._error}") from self._error

    def close(self) -> None:
        """End the threads and let the file go."""
        if self.is_closed:
            return
        self.is_closed = True
        for one in (self._writer, self._reader):
            one.shutdown(cancel_futures=True)
        self.file.close()


def _nothing() -> None:
    return None


def _too_small(host: TierAccount, size: int) -> BadInput:
    least = size + _STAGING_BYTES
    return bad_input(
        wanted=f"at least {least} bytes ({show_bytes(least)}) for a staging buffer and the largest tensor on its way",
        got=f"{host.limit} bytes",
        do=f"set host to {least} or more",
        key=f"{_KEY}.host",
    )
