"""Schedules of local steps for islands of unequal speed, so that all end a round together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalStepSchedule:
    """A schedule of local steps: of a round of H = `every` steps, rank r makes n = `steps[r]`, evenly spread.

    It makes step k (from 0) where floor((k + 1) n / H) > floor(k n / H); the last step of a round is always among them.

    `steps`: by rank; empty: all ranks make all steps, as they do the first `start`.
    """

    every: int = 1
    start: int = 0
    steps: tuple[int, ...] = ()

    def count(self, rank: int, done: int) -> int:
        """Return how many of the first `done` steps of the run `rank` makes."""
        if not self.steps or done <= self.start:
            return done
        rounds, k = divmod(done - self.start, self.every)
        n = self.steps[rank]
        return self.start + rounds * n + k * n // self.every

    def makes(self, rank: int, step: int) -> bool:
        """Return whether `rank` makes the step after `step` others."""
        return self.count(rank, step + 1) > self.count(rank, step)


def by_speed(seconds: Sequence[float], every: int) -> tuple[int, ...]:
    """Return the steps of every island in a round of `every`; the fastest makes all. `seconds`: of one step on each.

    n_i = max(1, round(H t_min / t_i)): the fastest waits at most half a step for an island, unless that makes only one.
    """
    fastest = min(seconds)
    return tuple(max(1, round(every * fastest / one)) if one > 0 else every for one in seconds)
