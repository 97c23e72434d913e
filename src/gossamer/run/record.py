"""The writer of records.jsonl: one line at a time, appended whole."""

from __future__ import annotations

import os
from pathlib import Path

from gossamer.spec.records import End, Record, Saved


class RecordWriter:
    """Appends records; a reader never sees half a line followed by another."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, record: Record) -> None:
        data = (record.line() + "\n").encode()
        while data:  # a full disk takes part of a line; a record must not stop the run
            try:
                data = data[os.write(self._fd, data) :]
            except OSError:
                return
        if isinstance(record, Saved | End):
            try:
                os.fsync(self._fd)
            except OSError:
                return

    def close(self) -> None:
        os.close(self._fd)
