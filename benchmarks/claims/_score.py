"""Time to a target, and AlgoPerf's score of it (Dahl et al., arXiv 2306.07179; first results arXiv 2502.15015).

Equations, for the time t of a method on a workload and the best time of all methods there:
    r = t / best ;   rho(tau) = share of workloads with r <= tau ;   B = 1 / (R - 1) integral_1^R rho(tau) dtau, R = 4
    B = mean over workloads of clip((R - r) / (R - 1), 0, 1)
A run that misses the target has an infinite time. The clock rests during evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

R_MAX = 4.0


def time_to(target: float, evaluations: Iterable[tuple[float, float]]) -> float:
    """Return the seconds of the first evaluation (seconds, loss) that is at the target or below, else infinity."""
    return next((seconds for seconds, loss in evaluations if loss <= target), math.inf)


def scores(times: Mapping[str, Sequence[float]], r_max: float = R_MAX) -> dict[str, float]:
    """Return B of each method, given its times on the same workloads in the same order."""
    best = [min(each) for each in zip(*times.values(), strict=True)]

    def part(time: float, least: float) -> float:
        return min(1.0, max(0.0, (r_max - time / least) / (r_max - 1))) if math.isfinite(time) else 0.0

    return {
        name: sum(part(time, least) for time, least in zip(each, best, strict=True)) / len(best)
        for name, each in times.items()
    }


def geometric_speedup(times: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the geometric mean of baseline / time; 0 for a missed target, NaN where only the baseline missed."""
    if any(math.isinf(time) for time in times):
        return 0.0
    if any(math.isinf(time) for time in baseline):
        return math.nan
    return math.exp(sum(math.log(b / t) for t, b in zip(times, baseline, strict=True)) / len(times))


def drawn(index: int, base: int) -> float:
    """Return number `index` of the quasi-random sequence of this base (van der Corput), within (0, 1)."""
    found, scale, rest = 0.0, 1.0, index + 1
    while rest:
        scale /= base
        found += scale * (rest % base)
        rest //= base
    return found
