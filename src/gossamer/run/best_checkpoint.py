"""The best checkpoint of a run: which evaluation was the best so far, and whether its checkpoint is on all disks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.spec.watched_figure import Figures, WatchedFigure


@dataclass(frozen=True, slots=True)
class BestValue:
    """The best value of a figure and the step of its evaluation; step -1: none so far."""

    step: int = -1
    value: float = math.nan

    @property
    def is_there(self) -> bool:
        return self.step >= 0


NO_VALUE = BestValue()


@dataclass(slots=True, kw_only=True)
class BestCheckpoint:
    """The best checkpoint, equal on all ranks. `data`: what the figure was computed on; other data, other figures.

    A new best is pending from its evaluation until the ranks have agreed that its checkpoint is on every disk. Until
    then the one before it stays on the disks too, so that there is a best checkpoint whatever fails.
    """

    figure: WatchedFigure
    data: str
    best: BestValue = NO_VALUE
    before: BestValue = NO_VALUE
    is_pending: bool = False

    def see(self, step: int, figures: Figures) -> bool:
        """Take an evaluation in; return whether it is the best so far. No best may be pending."""
        value = figures[self.figure.of, self.figure.figure]
        if not math.isfinite(value) or (self.best.is_there and not self.figure.is_better(value, self.best.value)):
            return False
        self.before, self.best, self.is_pending = self.best, BestValue(step, value), True
        return True

    def settle(self, *, is_saved: bool) -> None:
        """Set whether the pending best is on all disks; where it is not, the one before it is the best again."""
        if not is_saved:
            self.best = self.before
        self.before, self.is_pending = NO_VALUE, False

    @property
    def pinned(self) -> frozenset[int]:
        """Return the steps whose checkpoints must stay."""
        return frozenset(one.step for one in (self.best, self.before) if one.is_there)

    def meta(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves; empty while there is no best."""
        if not self.best.is_there:
            return {}
        return {"step": self.best.step, "value": self.best.value, "of": self.identity}

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Take up the best of a checkpoint; return a note for the user where it is of another figure or other data."""
        self.best, self.before, self.is_pending = NO_VALUE, NO_VALUE, False
        if not saved:
            return ""
        if saved["of"] != self.identity:
            return (
                f"the best checkpoint so far, of step {saved['step']}, is of another figure or of other data "
                f"({saved['of']}): it is looked for anew, and that one is not kept any longer"
            )
        self.best = BestValue(int(saved["step"]), float(saved["value"]))
        return ""

    @property
    def identity(self) -> str:
        """Return what makes two values comparable: the figure, its direction and the data."""
        return f"{'highest' if self.figure.highest else 'lowest'} {self.figure.words} on {self.data}"
