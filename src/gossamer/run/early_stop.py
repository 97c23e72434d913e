"""The early stop of a run: it ends once so many evaluations in a row have shown no improvement.

Rule: an evaluation improves where value < best - min_delta (of a figure whose highest value is the best, value > best +
min_delta); the run ends at the evaluation that is the `patience`-th in a row without one. All ranks have the same
values, so they end at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.run.best_checkpoint import NO_VALUE, BestValue
from gossamer.spec.watched_figure import Figures, WatchedFigure


@dataclass(slots=True, kw_only=True)
class EarlyStop:
    """The state of an early stop, equal on all ranks. `waited`: evaluations since the last improvement."""

    figure: WatchedFigure
    data: str
    patience: int
    min_delta: float
    best: BestValue = NO_VALUE
    waited: int = 0

    def see(self, step: int, figures: Figures) -> None:
        """Take an evaluation in."""
        value = figures[self.figure.of, self.figure.figure]
        improves = math.isfinite(value) and (
            not self.best.is_there or self.figure.is_better(value, self.best.value, self.min_delta)
        )
        if improves:
            self.best, self.waited = BestValue(step, value), 0
        else:
            self.waited += 1

    @property
    def is_over(self) -> bool:
        """Return whether the run ends here."""
        return self.waited >= self.patience

    @property
    def reason(self) -> str:
        """Return why the run ends, for people."""
        times = "1 evaluation" if self.waited == 1 else f"{self.waited} evaluations"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        since = f"{self.best.value:.4g} of step {self.best.step}" if self.best.is_there else "any number"
        return f"early stop: {times} without a better {self.figure.words} than {since}{by}"

    def meta(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves."""
        value = self.best.value if self.best.is_there else 0.0
        return {"step": self.best.step, "value": value, "waited": self.waited, "of": self.identity}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint; one of another figure or of other data counts for nothing."""
        self.best, self.waited = NO_VALUE, 0
        if saved and saved["of"] == self.identity:
            if saved["step"] >= 0:
                self.best = BestValue(int(saved["step"]), float(saved["value"]))
            self.waited = int(saved["waited"])

    @property
    def identity(self) -> str:
        """Return what makes two values comparable: the figure, its direction and the data."""
        return f"{'highest' if self.figure.highest else 'lowest'} {self.figure.words} on {self.data}"
