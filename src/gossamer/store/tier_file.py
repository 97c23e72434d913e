"""One file of fixed size that holds what does not fit memory, and a journal that says which version of it counts.

Reads and writes pass by the page cache (O_DIRECT) where the file system allows it. Elsewhere they go through it, and
`posix_fadvise` drops what was read or written. Buffers are page-aligned, and offsets and lengths multiples of a page.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch, bad_input
from gossamer.spec.units import show_gib

PAGE = 4096
_VECTOR = 256  # buffers of one request
_FAR = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "fuse.sshfs", "lustre", "afs"})


def paged(count: int) -> int:
    """Return the bytes of the pages that `count` bytes lie in."""
    return -(-count // PAGE) * PAGE


def page_buffer(size_bytes: int) -> Tensor:
    """Return a page-aligned buffer of zeros, (size_bytes,) uint8, outside of the allocator."""
    return PageMemory.of(size_bytes).buffer


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Memory outside of the allocator, whose pages go back to the system without it, as its heap keeps freed blocks.

    Its address stays the same.
    """

    buffer: Tensor  # (size_bytes,) uint8
    _pages: mmap.mmap | None

    @staticmethod
    def of(size_bytes: int) -> PageMemory:
        """Return memory that holds no page until it is written to."""
        if size_bytes == 0:
            return PageMemory(torch.empty(0, dtype=torch.uint8), None)
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return PageMemory(torch.frombuffer(pages, dtype=torch.uint8), pages)

    def free(self) -> None:
        """Give all pages back; what was in them is lost."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as a flat uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class TierFile:
    """An open file of fixed size. `is_direct`: reads and writes pass by the page cache."""

    path: Path
    size_bytes: int
    is_direct: bool
    _handle: int

    @staticmethod
    def create(path: Path, size_bytes: int, *, key: str = "plan.sharding.tiers.directory") -> TierFile:
        """Make the file, allocated as a whole. Raises BadInput: a full disk, or another run that uses it.

        `key`: the setting of the directory.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(plain, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(plain)
            raise bad_input(
                wanted="a directory that no other run uses for its states",
                got=f"{path}, which is in use",
                do="give each run a directory of its own, or stop the other run",
                key=key,
            ) from None
        try:
            os.ftruncate(plain, size_bytes)
            os.posix_fallocate(plain, 0, max(size_bytes, 1))
        except OSError as error:
            os.close(plain)
            with suppress(OSError):
                path.unlink()
            raise bad_input(
                wanted=f"{show_gib(size_bytes)} in {path.parent}",
                got=str(error.strerror),
                do="free space there, or give another directory",
                key=key,
            ) from None
        return TierFile(path, size_bytes, _takes_direct(plain), plain)

    @property
    def descriptor(self) -> int:
        """Return the descriptor, with which another process reads and writes the same file."""
        return self._handle

    def read(self, offset: int, *buffers: Tensor) -> None:
        """Fill the buffers, one after the other, from `offset` on; releases the interpreter lock."""
        views, done = [_memory(one) for one in buffers if len(one)], 0
        while views:
            got = os.preadv(self._handle, views[:_VECTOR], offset + done)
            if got <= 0:
                raise OSError(f"{self.path}: the file ends at byte {offset + done}")
            done += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]
        self._forget(offset, done)

    def write(self, offset: int, buffer: Tensor) -> None:
        """Write the buffer at `offset`; releases the interpreter lock."""
        view, done = _memory(buffer), 0
        while done < len(view):
            done += os.pwritev(self._handle, [view[done:]], offset + done)
        if not self.is_direct:
            os.fdatasync(self._handle)  # dirty pages are not dropped
            self._forget(offset, len(view))

    def settle(self) -> None:
        """Return when all that was written is on the disk."""
        os.fdatasync(self._handle)

    def mapped(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose memory is the file: what is written to it is written to the file."""
        return mapped_tensor(self.path, offset, shape, dtype)

    def close(self) -> None:
        os.close(self._handle)

    def _forget(self, offset: int, count: int) -> None:
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, offset, count, os.POSIX_FADV_DONTNEED)


def _memory(buffer: Tensor) -> memoryview:
    return buffer.numpy().data


def _takes_direct(handle: int) -> bool:
    """Switch the handle to O_DIRECT, and return whether a read then works."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
        if os.fstat(handle).st_size >= PAGE:
            os.preadv(handle, [_memory(page_buffer(PAGE))], 0)
        return True
    except OSError:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)
        return False


@dataclass(frozen=True, slots=True)
class TierJournal:
    """The file beside a tier file that says which version of each part counts. It is replaced as a whole."""

    path: Path

    def write(self, said: Mapping[str, Any]) -> None:
        """Replace what the journal says, so that after a crash it says the old or the new."""
        body = json.dumps(said, sort_keys=True)
        text = json.dumps({"crc": zlib.crc32(body.encode()), "said": body})
        beside = self.path.with_suffix(".writing")
        with beside.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self) -> dict[str, Any]:
        """Return what the journal says. Raises CheckpointMismatch where it is damaged."""
        try:
            found = json.loads(self.path.read_text("ascii"))
            body = found["said"]
            if zlib.crc32(body.encode()) == found["crc"]:
                said: dict[str, Any] = json.loads(body)
                return said
        except (OSError, ValueError, KeyError):
            pass
        raise CheckpointMismatch(f"{self.path}: is no journal of states in a file, or is damaged")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def mixed_rate(file: TierFile, size_bytes: int = 64 << 20) -> float:
    """Return the bytes per second of reads and writes at the same time, which overwrite the file's start."""
    block = min(4 << 20, file.size_bytes // 2 // PAGE * PAGE)
    if not block:
        return float("inf")
    count = max(1, min(size_bytes, file.size_bytes) // (2 * block))
    errors: list[BaseException] = []

    def move(work: Callable[[int, Tensor], None], first: int) -> None:
        buffer = page_buffer(block)
        buffer.random_(generator=torch.Generator().manual_seed(0))  # a disk may store zeros faster
        try:
            for i in range(count):
                work((first + i) * block, buffer)
        except OSError as error:
            errors.append(error)

    move(file.write, 0)  # blocks never written may be read faster
    began = time.perf_counter()
    threads = [Thread(target=move, args=(file.read, 0)), Thread(target=move, args=(file.write, count))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    file.settle()
    if errors:
        raise errors[0]
    return 2 * count * block / (time.perf_counter() - began)


def mapped_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory is a part of a file."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    data = np.memmap(path, np.uint8, "r+", offset, (prod(shape) * dtype.itemsize,))
    return torch.from_numpy(data).view(dtype).view(shape)


@contextmanager
def not_in_use(path: Path) -> Iterator[bool]:
    """Keep a tier file from being opened inside the context; yield whether no run has it open."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(handle)


def disk_number(directory: Path) -> int:
    """Return a number of 48 bits for the file system of `directory`, equal for processes that see the same one.

    On this machine those are told by its device, on others by what the file system says of itself.
    """
    there = _existing(directory)
    if is_far(kind := file_system(directory)):
        said = f"{kind} {os.statvfs(there).f_fsid}"
    else:
        booted = Path("/proc/sys/kernel/random/boot_id")
        said = f"{booted.read_text() if booted.exists() else socket.gethostname()} {there.stat().st_dev}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:6], "big")


def _existing(directory: Path) -> Path:
    return next(one for one in (directory.absolute(), *directory.absolute().parents) if one.exists())


def free_bytes(directory: Path) -> int:
    """Return the bytes that may be written below `directory`, which need not exist yet."""
    stat = os.statvfs(_existing(directory))
    return stat.f_bavail * stat.f_frsize


def file_system(directory: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that `directory` is on; "" where it is not known."""
    try:
        lines = (Path("/proc/self/mounts").read_text("utf-8") if mounts is None else mounts).splitlines()
    except OSError:
        return ""
    here, found = directory.absolute().resolve(), ("", "")
    for line in lines:
        _, where, kind, *_ = line.split()
        if here.is_relative_to(where) and len(where) >= len(found[0]):
            found = (where, kind)
    return found[1]


def is_far(kind: str) -> bool:
    """Return whether a file system of this type is on another machine."""
    return kind in _FAR


__all__ = [
    "PAGE",
    "PageMemory",
    "TierFile",
    "TierJournal",
    "as_bytes",
    "disk_number",
    "file_system",
    "free_bytes",
    "is_far",
    "mapped_tensor",
    "mixed_rate",
    "not_in_use",
    "page_buffer",
    "paged",
]
