"""A reader of a growing file of records, one complete line at a time."""

from __future__ import annotations

from pathlib import Path

from gossamer.spec.records import Record, read_record


class Tail:
    """A reader of the records added since its last read; holds no open file in between.

    A line without its end is left for the next read: its writer may be in the middle of it.
    """

    def __init__(self, file: Path, *, most_bytes: int | None = None) -> None:
        """`most_bytes`: read at one time, where the file is longer; None: all there is."""
        self._file = file
        self._offset = 0
        self._most_bytes = most_bytes
        self.is_behind = False  # the last read left complete lines for the next one

    def read(self) -> list[Record]:
        """Return the new records, possibly none; the file need not exist yet. A file that shrank is read anew.

        A file that cannot be read has no new records: following a run must not fail.
        """
        try:
            return self._read()
        except OSError:
            return []

    def _read(self) -> list[Record]:
        size = self._file.stat().st_size
        if size < self._offset:
            self._offset = 0
        if size == self._offset:
            return []
        with self._file.open("rb") as source:
            source.seek(self._offset)
            block = source.read() if self._most_bytes is None else source.read(self._most_bytes)
            is_all = self._most_bytes is None or len(block) < self._most_bytes
            if not is_all and b"\n" not in block:  # one line, longer than that
                block, is_all = block + source.read(), True
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.is_behind = not is_all
        lines = (line for line in whole.decode("utf-8", "replace").splitlines() if line.startswith("{"))
        return [record for line in lines if (record := read_record(line)) is not None]

    def skip(self) -> None:
        """Skip the records that are there now: `read` then returns later ones only."""
        self.read()
