"""The last lines of one rank's log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

END_BYTES = 8192
LINES = 200
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colors and the like, of programs that take a log for a terminal


@dataclass(slots=True)
class LogEnd:
    """The end of a log file that grows: its last lines, and when it was last written to (0: no such file, or empty)."""

    file: Path
    lines: tuple[str, ...] = ()
    written_s: float = 0.0
    _version: tuple[int, int] = (0, 0)

    def read(self) -> None:
        """Read the last END_BYTES where the file has changed. A file that cannot be read has no lines."""
        try:
            found = self.file.stat()
            version = (found.st_mtime_ns, found.st_size)
            if version == self._version:
                return
            with self.file.open("rb") as source:
                source.seek(max(0, found.st_size - END_BYTES))
                block = source.read()
        except OSError:
            self.lines, self.written_s, self._version = (), 0.0, (0, 0)
            return
        lines = _CONTROL.sub("", block.decode("utf-8", "replace")).splitlines()
        if found.st_size > END_BYTES:
            lines = lines[1:]  # cut in the middle
        self.lines = tuple(lines[-LINES:])
        self.written_s = found.st_mtime if found.st_size else 0.0
        self._version = version
