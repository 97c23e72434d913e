"""A trial of a sweep: one point of its grid with one seed and a number of steps, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

METRICS = {  # figures of a run's summary, smaller is better, best first: name -> unit
    "validation_bits_per_byte": "validation bits/byte",
    "validation_loss": "validation loss",
    "final_loss": "loss of the last step",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep. `point`: number of the grid's point; `overrides`: key=value settings of that point."""

    point: int
    overrides: tuple[str, ...]
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Return the name of the trial's folder and log, unique within the sweep."""
        return f"{self.point:03d}-seed{self.seed}-{self.steps}steps"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return all settings of the run as key=value."""
        return (*self.overrides, f"train.seed={self.seed}", f"train.steps={self.steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The end of a trial: done with its figures, or failed with the reason in `error`."""

    trial: str  # name
    outcome: str  # "done" | "failed"
    directory: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)  # of METRICS
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.outcome == "done"

    @staticmethod
    def of_summary(trial: Trial, summary: Mapping[str, Any]) -> TrialResult:
        """Return the result of a run from its summary; failed where its loss is no number."""
        figures = {name: float(summary[name]) for name in METRICS if summary.get(name) is not None}
        directory, seconds = str(summary.get("directory") or ""), float(summary.get("seconds") or 0.0)
        unmeasured = [name for name in METRICS if name in summary and not math.isfinite(figures.get(name, math.nan))]
        if "final_loss" in unmeasured or ("validation_loss" in unmeasured and summary.get("validation_step")):
            error = "its loss is no number (it diverged): lower the learning rate"
            return TrialResult(trial=trial.name, outcome="failed", directory=directory, seconds=seconds, error=error)
        return TrialResult(trial=trial.name, outcome="done", directory=directory, seconds=seconds, figures=figures)

    def line(self) -> dict[str, Any]:
        """Return the result as a line of the journal."""
        return asdict(self)


def common_metric(results: Iterable[TrialResult]) -> str | None:
    """Return the best metric that every trial that is done has; None without one."""
    done = [result for result in results if result.is_done]
    return next((name for name in METRICS if done and all(name in one.figures for one in done)), None)
