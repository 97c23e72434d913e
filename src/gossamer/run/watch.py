"""What a run does about its evaluations: the best checkpoint it keeps, and its early stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.run.best_checkpoint import BestCheckpoint
from gossamer.run.early_stop import EarlyStop
from gossamer.run.parts import Parts
from gossamer.spec.watched_figure import Figures, WatchedFigure
from gossamer.spec.watched_keys import best_figure, stop_figure


@dataclass(slots=True)
class Watch:
    """The best checkpoint and the early stop of a run, where its configuration asks for them."""

    best: BestCheckpoint | None = None
    stop: EarlyStop | None = None

    @staticmethod
    def of(parts: Parts) -> Watch:
        """Return what the configuration asks for. Raises BadInput for a figure that no evaluation will have."""
        config, sets = parts.config, tuple(parts.validation)
        keep, stop, early = best_figure(config, sets), stop_figure(config, sets), config.train.early_stop
        return Watch(
            None if keep is None else BestCheckpoint(figure=keep, data=_data(parts, keep)),
            None
            if stop is None
            else EarlyStop(figure=stop, data=_data(parts, stop), patience=early.patience, min_delta=early.min_delta),
        )

    @property
    def is_on(self) -> bool:
        """Return whether evaluations decide anything."""
        return self.best is not None or self.stop is not None

    @property
    def is_over(self) -> bool:
        """Return whether the run ends early."""
        return self.stop is not None and self.stop.is_over

    def see(self, step: int, figures: Figures) -> bool:
        """Take an evaluation in; return whether it is the best so far, whose checkpoint is to be saved."""
        if self.stop is not None:
            self.stop.see(step, figures)
        return self.best is not None and self.best.see(step, figures)

    def meta(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves."""
        found: dict[str, Any] = {}
        if self.best is not None and (kept := self.best.meta()):
            found["best"] = dict(kept)
        if self.stop is not None:
            found["early_stop"] = dict(self.stop.meta())
        return found

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Take up the state of a checkpoint; return a note for the user, "" for none."""
        if self.stop is not None:
            self.stop.restore(saved.get("early_stop", {}))
        return "" if self.best is None else self.best.restore(saved.get("best", {}))


def _data(parts: Parts, figure: WatchedFigure) -> str:
    """Return what tells the data of a figure from other data: a fingerprint, and the number of sequences."""
    one = parts.validation[figure.of]
    count = len(one.batches.first(parts.config.train.evaluate_sequences))
    return f"{count} sequences" + (f" of {one.fingerprint[:16]}" if one.fingerprint else "")
