"""Say which rank the others wait for in every step, and which batch fractions would suit all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.data.share import share_rows
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_seconds

_UNEQUAL = 1.5  # factor between the slowest rank and the fastest: machines that are alike differ by less at times
_STILL = 1.3  # the same for a rank that was named already: it is not named again as it comes back over the limit
_ALIKE = 0.9  # of the slowest rank: one that was named stays the slow one where it takes as much
_GAIN = 0.8  # of what a step computes: fractions that leave more of it are not worth a setting
_MOST = 16  # fractions to list
_NONE = -1


@dataclass(slots=True)
class UnequalRanks:
    """What the user knows of ranks that are slower than others; every rank has the same, as all are told the same.

    `told`: the slow rank that was named last. A rank that becomes slow in mid-run is named once two looks running say
    so, as is one that was slow before and is again.
    """

    told: int = _NONE
    _last: int = _NONE

    def at_start(self, seconds: Sequence[float], plan: Plan) -> str:
        """Return which rank is slow, and what would help; "" if none is, or the user knows.

        `seconds`: what each computes in a step.
        """
        before, self.told = self.told, self._slow(seconds, plan)
        self._last = self.told
        return "" if self.told in (before, _NONE) else _said(self.told, seconds, plan)

    def later(self, seconds: Sequence[float], plan: Plan) -> str:
        """Return the same of steps in mid-run, if it is news."""
        before, self._last = self._last, self._slow(seconds, plan)
        if self._last != before or self._last == self.told:
            return ""
        self.told = self._last
        return "" if self.told == _NONE else _said(self.told, seconds, plan)

    def _slow(self, seconds: Sequence[float], plan: Plan) -> int:
        """Return the slowest rank, if it takes 1.5 times what the fastest takes. Of several, the one that was named.

        In stages ranks hold different parts.
        """
        slowest_s, fastest_s = max(seconds), min(seconds)
        if plan.mesh.in_stages or fastest_s <= 0:
            return _NONE
        if self.told != _NONE and seconds[self.told] >= max(_STILL * fastest_s, _ALIKE * slowest_s):
            return self.told
        return seconds.index(slowest_s) if slowest_s >= _UNEQUAL * fastest_s else _NONE


def _said(slow: int, seconds: Sequence[float], plan: Plan) -> str:
    fast = seconds.index(min(seconds))
    said = (
        f"rank {slow} computes {show_seconds(seconds[slow])} in a step, rank {fast} only "
        f"{show_seconds(seconds[fast])}, and waits for the other"
    )
    if len(plan.rows) != len(seconds) or len(seconds) > _MOST:
        return said
    speeds = [rows / rank_s for rows, rank_s in zip(plan.rows, seconds, strict=True)]
    better = share_rows(sum(plan.rows), speeds)
    step_s = max(rows / speed for rows, speed in zip(better, speeds, strict=True))
    if step_s > _GAIN * seconds[slow]:
        return said
    return f"{said}; with plan.batch_fractions={list(better)} a step would compute {show_seconds(step_s)}"
