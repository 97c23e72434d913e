"""The output of commands: answers on stdout, errors as one block on stderr, with --json one object as the last line.

The only place in the package that prints; commands return values.
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TextIO

from cyclopts import Parameter

from gossamer.view.screen import Screen

Json = Annotated[
    bool,
    Parameter(name="--json", negative="", show_default=False, help="end with one JSON object, as the last line"),
]


class ReaderGone(BrokenPipeError):
    """Standard output is a pipe whose reader has left, as `head` does once it has enough."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command: `data` for --json, `text` for people, and the exit code.

    `is_report`: the text reports work that is done and saved, so that the exit code holds even if it cannot be written.
    """

    data: Mapping[str, Any]
    text: str = ""
    exit_code: int = 0
    is_report: bool = False


def write_piece(text: str) -> None:
    """Write a part of an answer to standard output, at once: for commands that write while they work."""
    _write(text)


def write_line(data: Mapping[str, Any]) -> None:
    """Write one JSON object as a line of standard output."""
    OutputWriter(json=True).answer(CommandResult(data))


def write_note(text: str) -> None:
    """Write a line about the work to standard error; one that nobody can read any more ends no work."""
    with suppress(OSError, ValueError):
        _write(text + "\n", sys.stderr)


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """The failure of a command: its exit code, a headline, and the message (one or more lines)."""

    exit_code: int
    title: str
    said: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputWriter:
    """The writer to standard output and error; with `json` it ends with one JSON object."""

    json: bool

    def answer(self, answer: CommandResult) -> int:
        """Write the result of a command; return its exit code."""
        if self.json:
            self._line(dict(answer.data))
        elif answer.text:
            _write(answer.text.rstrip("\n") + "\n")
        return answer.exit_code

    def unheard(self, answer: CommandResult, error: OSError) -> int:
        """Report that a result could not be written (a full disk behind standard output); return the exit code."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it has nowhere to go, either
        why = f"cannot write to standard output: {error.strerror or error}"
        if answer.is_report:
            write_note(f"The command is done, but its result is not printed: {why}")
            return answer.exit_code
        return OutputWriter(json=False).failure(CommandFailure(3, "The answer could not be written:", why))

    def failure(self, failure: CommandFailure) -> int:
        """Write a failure; return its exit code, also where nobody can read it."""
        with suppress(OSError, ValueError):
            self._block(failure)
        if self.json:
            with suppress(OSError, ValueError):
                self._line({"error": failure.said.strip(), **failure.extra, "exit": failure.exit_code})
        return failure.exit_code

    def _block(self, failure: CommandFailure) -> None:
        from rich.text import Text

        from gossamer.view.console import TerminalConsole

        color = "yellow" if failure.exit_code == 4 else "red"
        block = Text(f"{failure.title}\n", style=f"bold {color}")
        body = "\n".join(f"  {line}".rstrip() for line in failure.said.strip().splitlines())
        sys.stdout.flush()
        console = TerminalConsole(stderr=True, soft_wrap=True, highlight=False)
        console.print(block.append(_printable(body, sys.stderr.encoding), style="not bold default"))

    def _line(self, data: dict[str, Any]) -> None:
        _write(json.dumps(_plain(data), allow_nan=False, default=str) + "\n")


def _write(text: str, out: TextIO | None = None) -> None:
    to = sys.stdout if out is None else out
    try:
        to.write(_printable(text, to.encoding))
        to.flush()
    except BrokenPipeError as error:
        if out is not None:
            raise
        raise ReaderGone(*error.args) from None


def _printable(text: str, encoding: str | None) -> str:
    """Return text that a terminal of that encoding can show: a model may write anything, control sequences included."""
    encoding = encoding or "utf-8"
    text = "".join(c if c in "\n\t" or (ord(c) >= 32 and ord(c) != 127) else f"\\x{ord(c):02x}" for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(inner) for inner in value]
    return value


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ", screen: Screen | None = None) -> str:
    """Return rows as aligned columns; the last one is not padded.

    `screen`: of one with fewer columns than that takes, every row has a line for each of its cells, named by the first
    row.
    """
    if screen is not None and rows and screen.columns is not None:
        wide = table(rows, indent=indent)
        if max(map(len, wide.splitlines())) > screen.columns:
            return _narrow(rows, indent, screen.columns)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append((indent + "  ".join([*cells, row[-1]])).rstrip())
    return "\n".join(lines)


def _narrow(rows: Sequence[Sequence[str]], indent: str, columns: int) -> str:
    """Return rows below their first one as a line for each cell, with the name of its column."""
    head, lines = rows[0], list[str]()
    for row in rows[1:]:
        lines.append(f"{indent}{row[0]}")
        for name, cell in zip(head[1:], row[1:], strict=True):
            said = f"{name}: {cell}" if name else cell
            lines += textwrap.wrap(said, max(12, columns), initial_indent=2 * indent, subsequent_indent=3 * indent)
    return "\n".join(lines)
