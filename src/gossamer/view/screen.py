"""What text is written for: how many columns a line may have, and whether it may hold more than ASCII."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Screen:
    """The place of a text: `columns` of characters in a line (None: any number, as in a pipe)."""

    columns: int | None = None
    is_unicode: bool = False

    @staticmethod
    def of(out: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> Screen:
        """Return the screen behind `out` (default: standard output). The variable COLUMNS wins, also for a pipe."""
        out = sys.stdout if out is None else out
        encoding = (out.encoding or "").lower().replace("-", "").replace("_", "")
        is_unicode = encoding == "utf8" and environ.get("TERM") != "linux"  # the kernel's console lacks most glyphs
        return Screen(_columns(out, environ), is_unicode)


def _columns(out: TextIO, environ: Mapping[str, str]) -> int | None:
    said = environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    try:
        return (os.get_terminal_size(out.fileno()).columns or 80) if out.isatty() else None
    except (OSError, ValueError):  # closed, or no file at all
        return None


def printable(text: str) -> str:
    """Return text on one line, without what could steer a terminal: names of models and data are anybody's words."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def cut(text: str, columns: int | None) -> str:
    """Return text of at most `columns` characters; what is left out is shown as two dots."""
    if columns is None or len(text) <= columns:
        return text
    return text[: columns - 2] + ".." if columns > 2 else text[: max(0, columns)]
