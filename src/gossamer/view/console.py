"""A console of rich whose broken pipe is an error like any other."""

from __future__ import annotations

from rich.console import Console


class TerminalConsole(Console):
    """rich answers a terminal that went away with SystemExit, and closes standard output: here it is an OSError."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the terminal went away")
