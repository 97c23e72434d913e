"""A memory page that a worker shares with its supervisor: the worker's last position, also after it is killed.

The worker writes it at every operation; heartbeats are too rare for that. The page has no name on any disk, so no file
remains.
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
    """The position of a rank. `sequence` counts operations in an order all ranks share; -1: unknown."""

    step: int = -1
    phase: str = "start"
    op: str = ""
    sequence: int = -1


@dataclass(frozen=True, slots=True)
class LastWord:
    """The exit that a worker records before it ends. `code`: its exit code, -1 where nothing is recorded.

    `for_all`: the record holds for the whole run, all of which is saved: no later failure of a process changes it.
    `why`: the worker's error, "Kind: message", also where no disk takes an error report any more.
    """

    code: int = -1
    for_all: bool = False
    why: str = ""


class PositionPage:
    """The supervisor's side of the shared memory page. Pass `descriptor` to the worker."""

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
        """Return the position that the worker wrote last.

        If it was killed while writing, the texts may belong to two operations.
        """
        step, sequence, phase_bytes, op_bytes = _FORM.unpack_from(self._memory, 0)
        phase = self._memory[_FORM.size : _FORM.size + min(phase_bytes, _TEXT_BYTES)]
        op = self._memory[_FORM.size + _TEXT_BYTES : _FORM.size + _TEXT_BYTES + min(op_bytes, _TEXT_BYTES)]
        return Position(step, phase.decode("utf-8", "replace"), op.decode("utf-8", "replace"), sequence)

    def word(self) -> LastWord:
        """Return the exit that the worker recorded."""
        code, for_all, size = _WORD.unpack_from(self._memory, _WORD_AT)
        begin = _WORD_AT + _WORD.size
        return LastWord(
            code, bool(for_all), self._memory[begin : begin + min(size, _WHY_BYTES)].decode("utf-8", "replace")
        )

    def close(self) -> None:
        """Unmap the page and close its file."""
        self._memory.close()
        self._file.close()


def open_box(descriptor: int) -> mmap.mmap:
    """Map the page in the worker.

    Raises OSError when `descriptor` cannot be mapped, ValueError when its file is shorter than a page record.
    """
    return mmap.mmap(descriptor, _BYTES)


def write_word(memory: mmap.mmap, word: LastWord) -> None:
    """Write the exit of a worker into the page."""
    why = word.why.encode("utf-8", "replace")[:_WHY_BYTES]
    begin = _WORD_AT + _WORD.size
    memory[begin : begin + len(why)] = why
    _WORD.pack_into(memory, _WORD_AT, word.code, word.for_all, len(why))


def write_position(memory: mmap.mmap, position: Position) -> None:
    """Write the position of a worker into the page; takes some two microseconds."""
    phase, op = (text.encode("utf-8", "replace")[:_TEXT_BYTES] for text in (position.phase, position.op))
    _FORM.pack_into(memory, 0, position.step, position.sequence, len(phase), len(op))
    memory[_FORM.size : _FORM.size + len(phase)] = phase
    memory[_FORM.size + _TEXT_BYTES : _FORM.size + _TEXT_BYTES + len(op)] = op
