"""One shard of a checkpoint: a safetensors file, written as a stream, with offset and checksum of every slice.

The file is an ordinary one that the safetensors library opens. That library's writer makes a second copy of every
tensor and hashes nothing. This one checksums each block while it is in the cache, copies nothing, and releases the
interpreter lock for all of it, so that training continues.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch, bad_input
from gossamer.store.checkpoint.checksum import CODES, digest, dtype_name, dtype_of, identity, raw_bytes
from gossamer.store.slices import NamedSlice, Slice

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """The position of one slice in a shard: `offset` bytes from the start of the file, `size_bytes` long."""

    where: Slice
    dtype: str
    offset: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The description of one shard file: its size, header digest and slices, to detect any later change."""

    file: str
    size_bytes: int
    header_bytes: int
    header_digest: str
    placed: tuple[Placed, ...]


def write_shard(path: Path, pieces: Sequence[NamedSlice], info: dict[str, str]) -> Shard:
    """Write contiguous CPU tensors to a new shard and make it durable.

    Raises BadInput for a dtype safetensors lacks, OSError.
    """
    pieces = sorted(pieces, key=lambda piece: (-piece[1].element_size(), str(piece[0])))  # big items first: aligned
    header = _header(pieces, info)
    offset = len(header)
    placed = []
    with path.open("xb") as file:
        file.write(header)
        for where, tensor in pieces:
            crc = _write_block_by_block(file, raw_bytes(tensor), identity(where, dtype_name(tensor.dtype)))
            placed.append(Placed(where, dtype_name(tensor.dtype), offset, tensor.nbytes, crc))
            offset += tensor.nbytes
        file.flush()
        os.fsync(file.fileno())
        _forget_cached(file)
    return Shard(path.name, offset, len(header), digest(header), tuple(placed))


def _write_block_by_block(file: BinaryIO, data: memoryview, crc: int) -> int:
    for at in range(0, len(data), _BLOCK_BYTES):
        block = data[at : at + _BLOCK_BYTES]
        crc = zlib.crc32(block, crc)
        file.write(block)
    return crc


def _forget_cached(file: BinaryIO) -> None:
    """Drop the file from the page cache, so that reading back asks the disk. Best effort."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header(pieces: Iterable[NamedSlice], info: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": info}
    at = 0
    for where, tensor in pieces:
        name = dtype_name(tensor.dtype)
        if name not in CODES:
            raise bad_input(
                wanted=f"a tensor of one of {', '.join(CODES)}",
                got=f"{name} in {where}",
                do="convert it before it is saved",
            )
        if tuple(tensor.shape) != where.size:
            raise bad_input(
                wanted=f"a tensor of shape {where.size} for {where}",
                got=f"{tuple(tensor.shape)}",
                do="pass that slice of the tensor",
            )
        if str(where) in entries:
            raise bad_input(wanted="every slice once", got=f"{where} twice", do="give it once")
        entries[str(where)] = {
            "dtype": CODES[name],
            "shape": list(where.size),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ShardReader:
    """A memory-mapped shard; opening checks length and header, `data` returns a slice's tensor without checking it."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        """Raise CheckpointMismatch where the file is missing, of another length, or has another header."""
        self._path = folder / shard.file
        self._shard = shard
        _check_size(self._path, shard)
        self._bytes = np.memmap(self._path, np.uint8, mode="c")  # copy on write: torch wants writable memory
        if digest(self._bytes[: shard.header_bytes].tobytes()) != shard.header_digest:
            raise CheckpointMismatch(
                f"{self._path}: the header differs from the one the manifest describes (altered, or of another shard)"
            )

    def data(self, placed: Placed) -> Tensor:
        """Return the slice as a tensor backed by the mapped file: pages are read when touched."""
        if placed.size_bytes == 0:
            return torch.empty(placed.where.size, dtype=dtype_of(placed.dtype))
        flat = torch.from_numpy(self._bytes[placed.offset : placed.offset + placed.size_bytes])
        return flat.view(dtype_of(placed.dtype)).view(placed.where.size)

    def check(self, placed: Placed) -> None:
        """Raise CheckpointMismatch, naming file and slice, where the data differ from those that were written."""
        data = self._bytes[placed.offset : placed.offset + placed.size_bytes].data
        got = zlib.crc32(data, identity(placed.where, placed.dtype))
        if got != placed.crc:
            raise CheckpointMismatch(
                f"{self._path}: slice {placed.where} (bytes {placed.offset} to {placed.offset + placed.size_bytes}) "
                f"has checksum {got:08x}, written was {placed.crc:08x}"
            )

    def check_all(self) -> None:
        """Check every slice, and that the safetensors library finds the slices of the manifest in the file."""
        for placed in self._shard.placed:
            self.check(placed)
        try:
            with safe_open(self._path, framework="numpy") as file:
                keys = set(file.keys())
        except SafetensorError as error:
            raise CheckpointMismatch(f"{self._path}: is not a safetensors file: {error}") from None
        if keys != {str(placed.where) for placed in self._shard.placed}:
            raise CheckpointMismatch(f"{self._path}: holds other slices than the manifest lists")


def _check_size(path: Path, shard: Shard) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointMismatch(f"{path}: cannot be read: {error.strerror}") from None
    if size != shard.size_bytes:
        gone = next((placed for placed in shard.placed if placed.offset + placed.size_bytes > size), None)
        lost = f"; the first missing slice is {gone.where}" if gone else ""
        raise CheckpointMismatch(f"{path}: {size} bytes long, {shard.size_bytes} bytes were written{lost}")
