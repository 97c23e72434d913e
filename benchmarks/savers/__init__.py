"""Rows of benchmarks/savers.py: one file per method, found by its name; each has `rows(quick=...)`.

A file with TOKENS also takes the `tokens` of a run that trains, and the journal `trials` in which it keeps every run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured way of saving memory. None: this row has no such figure.

    peer                what it stands beside: the name of another program or of plain training; empty for ours
    peak_bytes          most memory in use, above what was in use before it, unless `setting` says other
    planned_peak_bytes  the same as forecast before the run
    step_s              median seconds of a step
    hidden_share        part of the extra work that ran while something else was running anyway
    bytes_per_parameter optimizer states of one parameter
    loss                at the end, nats
    """

    method: str
    setting: str
    peer: str = ""
    peak_bytes: float | None = None
    planned_peak_bytes: float | None = None
    step_s: float | None = None
    hidden_share: float | None = None
    bytes_per_parameter: float | None = None
    loss: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
