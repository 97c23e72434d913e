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
_WORD = struct.Struct("=qHH")  # behind the texts
_WORD_AT = _FORM.size + 2 * _TEXT_BYTES
_WHY_BYTES = 2000
_BYTES = _WORD_AT + _WORD.size + _WHY_BYTES  # within a page: a disk that fills up later takes nothing from it


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands. `sequence` counts operations in an order all ranks share; -1: not told."""

    step: int = -1
    phase: str = "start"
    op: str = ""
    sequence: int = -1


@dataclass(frozen=True, slots=True)
class LastWord:
    """How a worker says that it ends: the exit code it will have, -1 where it has said nothing. `for_all`: it speaks
    for the whole run, all of which is saved and written down: what becomes of a process from now on changes nothing.
    `why`: its error, "Kind: message", also where no disk takes a note any more.
    """

    code: int = -1
    for_all: bool = False
    why: str = ""


class PositionPage:
    """The supervisor's end. Pass `descriptor` on to the worker."""

    def __init__(self) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._file.truncate(_BYTES)
        self._memory = mmap.mmap(self._file.fileno(), _BYTES)
        write_position(self._memory, Position())
        write_word(self._memory, LastWord())

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def read(self) -> Position:
        """What the worker wrote last. When it was killed while writing, the texts may be of two operations."""
        step, sequence, phase_bytes, op_bytes = _FORM.unpack_from(self._memory, 0)
        phase = self._memory[_FORM.size : _FORM.size + min(phase_bytes, _TEXT_BYTES)]
        op = self._memory[_FORM.size + _TEXT_BYTES : _FORM.size + _TEXT_BYTES + min(op_bytes, _TEXT_BYTES)]
        return Position(step, phase.decode("utf-8", "replace"), op.decode("utf-8", "replace"), sequence)

    def word(self) -> LastWord:
        """How the worker said that it ends."""
        code, for_all, size = _WORD.unpack_from(self._memory, _WORD_AT)
        begin = _WORD_AT + _WORD.size
        return LastWord(
            code, bool(for_all), self._memory[begin : begin + min(size, _WHY_BYTES)].decode("utf-8", "replace")
        )

    def close(self) -> None:
        self._memory.close()
        self._file.close()


def open_box(descriptor: int) -> mmap.mmap:
    """The worker's end; raises OSError when `descriptor` is none of a box."""
    return mmap.mmap(descriptor, _BYTES)


def write_word(memory: mmap.mmap, word: LastWord) -> None:
    why = word.why.encode("utf-8", "replace")[:_WHY_BYTES]
    begin = _WORD_AT + _WORD.size
    memory[begin : begin + len(why)] = why
    _WORD.pack_into(memory, _WORD_AT, word.code, word.for_all, len(why))


def write_position(memory: mmap.mmap, position: Position) -> None:
    """Some two microseconds."""
    phase, op = position.phase.encode()[:_TEXT_BYTES], position.op.encode()[:_TEXT_BYTES]
    _FORM.pack_into(memory, 0, position.step, position.sequence, len(phase), len(op))
    memory[_FORM.size : _FORM.size + len(phase)] = phase
    memory[_FORM.size + _TEXT_BYTES : _FORM.size + _TEXT_BYTES + len(op)] = op
