"""Quiet: warnings, failures and nothing else."""

from __future__ import annotations

from typing import TextIO

from gossamer.spec.records import End, Event, Record, Saved
from gossamer.view.display import Display
from gossamer.view.format import format_event, saved_words


class Quiet(Display):
    """The quiet display: prints warnings and failures alone."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, record: Record) -> None:
        if isinstance(record, Event) and record.level != "info":
            self._write(f"{record.level}: {format_event(record)}")
        elif isinstance(record, Saved) and record.error:
            self._write(f"warning: {saved_words(record)}")
        elif isinstance(record, End) and record.outcome == "failed":
            self._write(f"error: failed at step {record.step}: {record.message}")

    def recall(self, record: Record) -> None:
        pass

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()
