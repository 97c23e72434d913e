"""Rows that come over a network, kept as JSON lines: read once, and taken up where an earlier reading stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gossamer.spec.errors import BadInput

FILE = "rows.jsonl"
_PART = "rows.part"
_BLOCK_BYTES = 1 << 20


def keep_rows(folder: Path, rows: Callable[[int], Iterator[str]]) -> Path:
    """Return the complete file of rows in `folder`, written if it is not there: one row per line.

    `rows(n)` iterates the rows after the first n. Lines of a reading that stopped are kept; a half line is read again.
    """
    complete, part = folder / FILE, folder / _PART
    if complete.exists():
        return complete
    done = _complete_lines(part)
    try:
        with part.open("a", encoding="utf-8") as stream:
            for row in rows(done):
                stream.write(row + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, complete)
    except (OSError, UnicodeEncodeError) as error:
        said = (isinstance(error, OSError) and error.strerror) or str(error)
        raise BadInput(f"cannot write {part}: {said}: free disk space, or set data.cache", key="data.source") from None
    return complete


def _complete_lines(part: Path) -> int:
    """Return the number of lines in `part`, having cut off a last one that is not complete."""
    if not part.exists():
        return 0
    lines = end = seen = 0
    with part.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            lines += block.count(b"\n")
            end = seen + block.rfind(b"\n") + 1 if b"\n" in block else end
            seen += len(block)
    os.truncate(part, end)
    return lines
