"""LGreco: per-parameter settings that send the fewest bytes at the total error of one setting for all (L-GreCo).

Equations (parameters l, candidates c, d the default candidate):
    budget = alpha sum_l err[l, d]
    q[l, c] = max(1, ceil(err[l, c] bins / budget))
    choose c(l) to minimize sum_l exposed[l] size[l, c(l)]  subject to  sum_l q[l, c(l)] <= bins + L
    by  D_l[b] = min_c D_{l-1}[b - q[l, c]] + exposed[l] size[l, c],   D_0 = 0,   and the way back from D_L[bins + L]
Symbols: err[l, c] = |G_l - C_c(G_l)|, G_l the mean gradient; size[l, c] bytes; L parameters; alpha, bins fields.
The L spare bins are the most that rounding up adds, so the default is always feasible for alpha >= 1: what is chosen
never sends more than it. And the true error of what is chosen is at most budget (1 + L / bins).
Work:    L candidates bins additions, in rows of `bins`.
Paper:   Markov, Alim, Frantar, Alistarh, L-GreCo, arXiv 2210.17357.
Good when: layers differ in how well they compress (ranks, bits).   Not for: measurements of a single early step; top-k,
whose largest entries of a whole bucket are already where they are worth most (less error at fewer bytes, measured).
Unlike the paper's code: errors of the mean gradient (that of one rank depends on its data); bytes may be weighted by
how much of them is waited for; the spare bins.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.policy import AdaptChoices, NearbySettings, Policy
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Written
from gossamer.spec.statistics import Paths, Statistics


@dataclass(frozen=True, slots=True)
class LGreco(Policy):
    """A policy that chooses the compression of each parameter (layer) by dynamic programming over an error budget.

    `default`: the uniform setting to beat, "" for the run's exchange; it is always among the candidates. `candidates`:
    empty means ranks from half to twice the default's, or other codecs than its own.
    """

    default: Written = ""
    candidates: tuple[Written, ...] = ()
    alpha: float = 1.0
    bins: int = 10_000
    level: str = "all"

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise bad_input(wanted="alpha > 0", got=repr(self.alpha), do="set alpha to 1, for example", key="alpha")
        if self.bins < 1:
            raise bad_input(wanted="bins >= 1", got=repr(self.bins), do="set bins to 10000, for example", key="bins")

    def to_measure(self, now: Written, settings: NearbySettings) -> tuple[Written, ...]:
        own = self.default or now
        if not self.candidates:
            beside = settings.near(own)
            return (own, *beside) if beside else ()
        others = tuple(written for written in self.candidates if not settings.are_equal(written, own))
        if len(others) == len(self.candidates) and not self.default:
            return ()  # a method the candidates do not speak of
        return (own, *others)

    def choose(self, statistics: Statistics, paths: Paths) -> AdaptChoices:
        uniform = self.default or statistics.default
        if uniform not in statistics.candidates:
            raise bad_input(
                wanted=f"the default {uniform!r} among the candidates",
                got=repr(list(statistics.candidates)),
                do="add it to candidates, or set default to one of them",
                key="default",
            )
        default = statistics.candidates.index(uniform)
        error = np.array(statistics.error, dtype=np.float64).reshape(len(statistics.names), -1)
        weight = np.array(statistics.exposed or (1.0,) * len(statistics.names))
        size = np.array(statistics.nbytes, dtype=np.float64).reshape(error.shape) * weight[:, None]
        total = math.fsum(error[:, default])  # in the same way on every machine, as all that follows: ranks must agree
        found = cheapest(error, size, default, budget=self.alpha * total, bins=self.bins)
        if found is None:
            return AdaptChoices(((".*", self.level, uniform),), "one setting for all: the errors cannot be judged")
        return self._choices(statistics, found, default, error)

    def _choices(
        self, statistics: Statistics, found: list[int], default: int, error: NDArray[np.float64]
    ) -> AdaptChoices:
        rules = [
            ("^" + re.escape(name) + "$", self.level, statistics.candidates[c])
            for name, c in zip(statistics.names, found, strict=True)
            if c != default
        ]
        before = sum(row[default] for row in statistics.nbytes)
        after = sum(row[c] for row, c in zip(statistics.nbytes, found, strict=True))
        chosen = float(error[np.arange(len(found)), found].sum())
        share = chosen / max(1e-300, float(error[:, default].sum()))
        said = f"{after} bytes per step instead of {before}, at {share:.3f} of the error of one setting for all"
        return AdaptChoices((*rules, (".*", self.level, statistics.candidates[default])), said)


def cheapest(
    error: NDArray[np.float64], size: NDArray[np.float64], default: int, *, budget: float, bins: int
) -> list[int] | None:
    """Return the candidate of every layer with the least total size in the error budget; None for unusable errors."""
    layers = len(error)
    if not layers or not np.isfinite(error[:, default]).all() or not 0 < budget < math.inf:
        return None
    top = bins + layers
    scaled = np.where(np.isfinite(error), np.maximum(error, 0) * (bins / budget), top + 1)
    cost = np.maximum(1, np.ceil(np.minimum(scaled, top + 1))).astype(np.int64)  # (layers, candidates)
    least = np.zeros(top + 1)
    taken = np.zeros((layers, top + 1), dtype=np.int16)
    for layer in range(layers):
        least = _extend(least, cost[layer], size[layer], np.argsort(error[layer], kind="stable"), taken[layer])
    if not np.isfinite(least[top]):
        return None
    found, left = [0] * layers, top
    for layer in reversed(range(layers)):
        found[layer] = int(taken[layer, left])
        left -= int(cost[layer, found[layer]])
    return found


def _extend(
    least: NDArray[np.float64],
    cost: NDArray[np.int64],
    size: NDArray[np.float64],
    order: NDArray[np.int64],
    taken: NDArray[np.int16],
) -> NDArray[np.float64]:
    """Return least[b] for budgets b with one layer more, and write the candidate that gives it to `taken`; of equals,
    the first.
    """
    best = np.full_like(least, np.inf)
    for c in order:
        if cost[c] >= len(least):
            continue
        reached = least[: len(least) - cost[c]] + size[c]
        better = reached < best[cost[c] :]
        np.copyto(best[cost[c] :], reached, where=better)
        np.copyto(taken[cost[c] :], np.int16(c), where=better)
    return best
