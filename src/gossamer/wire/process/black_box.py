"""A page of memory that a worker shares with its supervisor: where it stood last, also when it is killed.

The worker writes it at every operation; beats are too rare for that. It has no name on any disk, so nothing of it
can be left behind.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
from dataclasses import dataclass
from typing import BinaryIO

_FORM = struct.Struct("=qqHH")
_TEXT_BYTES = 200
_BYTES = _FORM.size + 2 * _TEXT_BYTES


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands. `sequence` counts operations in an order all ranks share; -1: not told."""

    step: int = -1
    phase: str = "start"
    op: str = ""
    sequence: int = -1


class BlackBox:
    """The supervisor's end. Pass `descriptor` on to the worker."""

    def __init__(self) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._file.truncate(_BYTES)
        self._memory = mmap.mmap(self._file.fileno(), _BYTES)
        write_position(self._memory, Position())

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def read(self) -> Position:
        """What the worker wrote last. When it was killed while writing, the texts may be of two operations."""
        step, sequence, phase_bytes, op_bytes = _FORM.unpack_from(self._memory, 0)
        phase = self._memory[_FORM.size : _FORM.size + min(phase_bytes, _TEXT_BYTES)]
        op = self._memory[_FORM.size + _TEXT_BYTES : _FORM.size + _TEXT_BYTES + min(op_bytes, _TEXT_BYTES)]
        return Position(step, phase.decode("utf-8", "replace"), op.decode("utf-8", "replace"), sequence)

    def close(self) -> None:
        self._memory.close()
        self._file.close()


def open_box(descriptor: int) -> mmap.mmap:
    """The worker's end; raises OSError when `descriptor` is none of a box."""
    return mmap.mmap(descriptor, _BYTES)


def write_position(memory: mmap.mmap, position: Position) -> None:
    """Some two microseconds."""
    phase, op = position.phase.encode()[:_TEXT_BYTES], position.op.encode()[:_TEXT_BYTES]
    _FORM.pack_into(memory, 0, position.step, position.sequence, len(phase), len(op))
    memory[_FORM.size : _FORM.size + len(phase)] = phase
    memory[_FORM.size + _TEXT_BYTES : _FORM.size + _TEXT_BYTES + len(op)] = op
