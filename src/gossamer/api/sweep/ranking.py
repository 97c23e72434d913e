"""The ranking of a sweep's points: mean and spread over seeds, best first, points that failed last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from gossamer.api.sweep.trial import Trial, TrialResult, common_metric


@dataclass(frozen=True, slots=True, kw_only=True)
class PointScore:
    """The figures of one point at its last number of steps. `spread`: standard deviation over seeds; None of one."""

    point: int
    overrides: tuple[str, ...]
    steps: int
    values: tuple[float, ...]  # by seed, of those that are done
    seeds: int
    seconds: float
    best_directory: str
    errors: tuple[str, ...]

    @property
    def mean(self) -> float | None:
        """Return the mean over the seeds that are done; None without one."""
        return mean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Return the standard deviation over the seeds that are done; None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def is_complete(self) -> bool:
        return len(self.values) == self.seeds

    def row(self) -> dict[str, Any]:
        """Return the score, JSON-ready."""
        return {
            "overrides": list(self.overrides),
            "steps": self.steps,
            "mean": self.mean,
            "spread": self.spread,
            "values": list(self.values),
            "seeds": self.seeds,
            "seconds": self.seconds,
            "best": self.best_directory,
            "errors": list(self.errors),
        }


def ranked(trials: Sequence[Trial], results: Mapping[str, TrialResult], metric: str | None) -> list[PointScore]:
    """Return the scores of all points, best first: more steps before fewer (halving), all seeds before some.

    `metric`: a figure of the results, smaller is better. A point counts with its largest number of steps.
    """
    by_point: dict[int, list[Trial]] = {}
    for trial in trials:
        by_point.setdefault(trial.point, []).append(trial)
    scores = [
        _score([one for one in of if one.steps == max(o.steps for o in of)], results, metric)
        for of in by_point.values()
    ]
    return sorted(scores, key=_order)


def _order(score: PointScore) -> tuple[Any, ...]:
    average = score.mean
    return (average is None, -score.steps, not score.is_complete, 0.0 if average is None else average, score.point)


def _score(trials: Sequence[Trial], results: Mapping[str, TrialResult], metric: str | None) -> PointScore:
    found = [results[one.name] for one in trials if one.name in results]
    done = [one for one in found if one.is_done and metric is not None]
    values = tuple(one.figures[metric] for one in done) if metric is not None else ()
    best = done[values.index(min(values))].directory if values else ""
    return PointScore(
        point=trials[0].point,
        overrides=trials[0].overrides,
        steps=trials[0].steps,
        values=values,
        seeds=len(trials),
        seconds=sum(one.seconds for one in found),
        best_directory=best,
        errors=tuple(one.error for one in found if not one.is_done),
    )


def survivors(trials: Sequence[Trial], results: Mapping[str, TrialResult]) -> list[int]:
    """Return the points of a rung of successive halving that go on: the better half, rounded up, in grid order."""
    scores = ranked(trials, results, common_metric([results[one.name] for one in trials]))
    alive = [score.point for score in scores if score.values]
    return sorted(alive[: (len(scores) + 1) // 2])
