"""An append-only log file: each line is one JSON object behind its checksum.

    1f0c9b52 {"kind":"step","step":12,...}

The checksum reveals a line that a crash cut short, or that was altered. The next writer ends such a line before it
appends, so that no other line is damaged; the reader decides how to treat the gap.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckedLog:
    """The append-only log file at `path`, a checksum on every line; constructing it touches no disk."""

    path: Path

    def append(self, values: Mapping[str, Any], *, durable: bool = False) -> None:
        """Append one line; with `durable`, it and all lines before it survive a power cut. Raises OSError."""
        text = json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii")
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> Iterator[dict[str, Any] | None]:
        """Yield every line in order, None in place of a damaged one; yield nothing where there is no file."""
        if not self.path.exists():
            return
        with self.path.open("rb") as lines:
            for line in lines:
                yield _value(line)


def _value(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
