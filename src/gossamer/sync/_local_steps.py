"""Islands of unequal speed: which steps of a run each of them makes, so that all end a round together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalStepSchedule:
    """Of a round of H = `every` steps, rank r makes n = `steps[r]`, evenly spread and the last one among them:

    the k-th (from 0) where floor((k + 1) n / H) > floor(k n / H).

    `steps`: by rank; empty: all ranks make all steps, as they do the first `start`.
    """

    every: int = 1
    start: int = 0
    steps: tuple[int, ...] = ()

    def count(self, rank: int, done: int) -> int:
        """How many of the first `done` steps of the run it makes."""
        if not self.steps or done <= self.start:
            return done
        rounds, k = divmod(done - self.start, self.every)
        n = self.steps[rank]
        return self.start + rounds * n + k * n // self.every

    def makes(self, rank: int, step: int) -> bool:
        """Whether it makes the step after `step` others."""
        return self.count(rank, step + 1) > self.count(rank, step)


def by_speed(seconds: Sequence[float], every: int) -> tuple[int, ...]:
    """The steps of every island in a round, from the time of one step on each: the fastest makes all of them.

    n_i = max(1, round(H t_min / t_i)): nobody makes the fastest wait for longer than half a step, but for a single one.
    """
    fastest = min(seconds)
    return tuple(max(1, round(every * fastest / one)) if one > 0 else every for one in seconds)
