"""The list of runs for people: which of them are wanted, and lines that fit 40, 80 and 120 columns."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gossamer.spec.errors import bad_input
from gossamer.spec.suggest import nearest
from gossamer.view.run_glance import OUTCOMES, Glance
from gossamer.view.screen import Screen, cut, printable

_GAP = "  "
_NARROW = 60  # columns: below, a run has two lines
_LEAST = 12  # columns of a cell that is cut
_AGE = re.compile(r"(\d+)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which runs are listed: of that outcome and model, begun since then, and with all the words in their texts."""

    outcome: str = ""
    model: str = ""
    since_s: float = -math.inf
    words: tuple[str, ...] = ()

    @staticmethod
    def of(*, outcome: str = "", model: str = "", since: str = "", words: Sequence[str] = ()) -> Wanted:
        """Return what the options ask for; raises BadInput for an unknown outcome, or a time that is none."""
        if outcome and outcome not in OUTCOMES:
            raise bad_input(
                wanted=f"one of {', '.join(OUTCOMES)}",
                got=repr(outcome),
                do=nearest(outcome, OUTCOMES),
                key="--outcome",
            )
        since_s = _since(since) if since else -math.inf
        return Wanted(outcome=outcome, model=model, since_s=since_s, words=tuple(words))

    def fits(self, run: Glance) -> bool:
        """Return whether the run is wanted. A run without a start has the time at which it was written."""
        text = f"{run.name}\n{run.model}\n{run.data}".lower()
        begun_s = run.started_s if run.started_s is not None else run.written_s
        return (
            self.outcome in ("", run.outcome)
            and self.model.lower() in run.model.lower()
            and (self.since_s == -math.inf or (begun_s is not None and begun_s >= self.since_s))
            and all(word.lower() in text for word in self.words)
        )


def _since(text: str) -> float:
    """Return the time, in seconds since the epoch, that "90m", "7d" (before now) or "2026-11-01" (local) means."""
    if match := _AGE.fullmatch(text.strip()):
        return time.time() - int(match.group(1)) * _SECONDS[match.group(2)]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise bad_input(
            wanted="a time such as 90m, 12h, 7d, 2026-11-01 or 2026-11-01T08:30",
            got=repr(text),
            do="write one of these forms",
            key="--since",
        ) from None


def list_text(runs: Sequence[Glance], screen: Screen, *, now_s: float) -> str:
    """Return the runs as lines of at most `screen.columns` characters; of a narrow screen, two a run."""
    if not runs:
        return ""
    head = ("run", "outcome", "steps", "result", "age", "model", "data", "exchange")
    rows = [_cells(run, now_s) for run in runs]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    least = sum(widths[:4]) + 3 * len(_GAP)
    if screen.columns is not None and (screen.columns < _NARROW or least > screen.columns):
        return "\n".join(line for row in rows for line in _two_lines(row, screen.columns))
    widths = _fitted(widths, screen.columns)
    return "\n".join(_line(row, widths) for row in (head, *rows))


def _cells(run: Glance, now_s: float) -> tuple[str, ...]:
    begun_s = run.started_s if run.started_s is not None else run.written_s
    wanted = "?" if run.steps_wanted is None else str(run.steps_wanted)
    return (
        printable(run.name),
        run.outcome,
        f"{run.step}/{wanted}" if run.ranks is not None else "-",  # else it has not begun
        result_words(run),
        "" if begun_s is None else age_words(now_s - begun_s),
        printable(run.model),
        printable(run.data),
        printable(run.exchange),
    )


def result_words(run: Glance) -> str:
    """Return how good a run is by its last evaluation, else by the loss of its last step."""
    if run.validation_bits_per_byte is not None:
        return f"{run.validation_bits_per_byte:.3f} bits/byte"
    if run.validation_loss is not None:
        return f"val. loss {run.validation_loss:.4g}"
    return f"loss {run.loss:.4g}" if run.loss is not None else "-"


def age_words(seconds: float) -> str:
    """Return how long ago: 45 s -> "45s", 90 min -> "1h"; only the largest unit."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit] and (unit != "w" or seconds >= 9 * _SECONDS["w"]):
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{max(0, int(seconds))}s"


def _fitted(widths: list[int], columns: int | None) -> list[int]:
    """Return the widths of the columns that fit, the last of them cut to what is left; 0: left out."""
    if columns is None:
        return widths
    kept: list[int] = []
    left = columns + len(_GAP)
    for width in widths:
        room = left - len(_GAP)
        taken = width if width <= room else room if room >= _LEAST and len(kept) > 4 else 0
        kept.append(taken)
        left -= taken + len(_GAP) if taken else 0
        if taken < width:
            break
    return kept


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    shown = [(cut(cell, width), width) for cell, width in zip(row, widths, strict=False) if width]
    return _GAP.join(cell.ljust(width) for cell, width in shown).rstrip()


def _two_lines(row: Sequence[str], columns: int) -> tuple[str, str]:
    name, outcome, steps, result, age, *_ = row
    for parts in ((outcome, steps, result, age), (outcome, steps, result), (outcome, result), (outcome,)):
        if len(line := "  " + " ".join(parts)) <= columns:
            break
    return cut(name, columns), cut(line, columns)
