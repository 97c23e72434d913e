"""What the plan forecast of a step, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.spec.units import show_bytes, show_gib, show_seconds
from gossamer.view.report.blocks import Block, Paragraph, Table
from gossamer.view.run_history import RunHistory

_NAMES = {"compute_s": "computing", "exposed_s": "exposed communication", "step_s": "step", "peak_bytes": "peak memory"}


def forecast(run: RunHistory) -> list[Block]:
    """Return the table of forecast and measurement; a sentence where the plan forecast nothing; empty without steps."""
    told = run.summary
    if not run.steps:
        return []
    if not told["forecast"]:
        return [Paragraph("The plan has no forecast of a step: nothing was measured before it was made.")]
    rows = [row for name in _NAMES if (row := _row(run, name)) is not None]
    rows += [
        (f"sent on {link}", show_bytes(said), show_bytes(was), f"{100 * (was / said - 1):+.1f}%")
        for link, said in told["forecast"]["wire_bytes"].items()
        if said and (was := told["measured"]["wire_bytes"].get(link))
    ]
    if not rows:
        return [Paragraph("The plan forecast no figure that the records hold.")]
    head = ("figure, per step", "forecast", "measured, median", "difference")
    return [Table("Forecast and measurement", head, rows, figures_from=1)]


def _row(run: RunHistory, name: str) -> tuple[str, str, str, str] | None:
    said, was = run.summary["forecast"][name], run.summary["measured"][name]
    show: Callable[[float], str] = show_seconds
    if name == "peak_bytes":
        said, was, show = (said or [0])[0], (was or [0])[0], show_gib
    if not said or not was:
        return None
    return _NAMES[name], show(said), show(was), f"{100 * (was / said - 1):+.1f}%"
