"""The protocol of equal compute classes: methods are compared after the same seconds of a core, at several classes.

Source: Stanic et al., "The Languini Kitchen" (arXiv:2309.11197). There a class is 6 to 96 hours of an accelerator; here
30, 60, 120 and 240 seconds of one core. Nothing else is held equal: neither parameters, nor tokens, nor flop.
    tokens = throughput x class,
with the throughput (tokens per second) of the final code, data loading included, at the batch size where it is highest.
Measured is the bits per byte of held-out text, so tokenizers do not matter, and the trend over classes
    bits(c) = a c^-k        (a line through log bits over log c; least squares)
A method with a steeper trend (larger k) passes the other at the class where both lines cross.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from claims._grid import Tuned, tuned
from claims._trials import Trials

CLASSES = (30, 60, 120, 240)
TOLERANCE = 0.1  # of a class, that a training may take more or less than it


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One method.

    throughput: tokens per second of the code that trains, with so many sequences per step; batches: those to try.
    train: (batch, tokens, rate, seed) -> "bits_per_byte" and "seconds", of the processor, without evaluation.
    rate: where the grid of its learning rate begins.
    """

    name: str
    throughput: Callable[[int], float]
    train: Callable[[int, int, float, int], Mapping[str, float]]
    batches: tuple[int, ...]
    rate: float


@dataclass(frozen=True, slots=True)
class Scale:
    """What a contender reached: bits per byte by class and seed, at its best batch size and the rate of the grid."""

    batch: int
    tokens_per_s: float
    rates: Tuned
    bits: dict[float, list[float]]
    seconds: dict[float, list[float]] = field(default_factory=dict)

    @property
    def trend(self) -> tuple[float, float]:
        """Return (a, k) of bits = a c^-k."""
        x = [math.log(c) for c in self.bits]
        y = [math.log(mean(each)) for each in self.bits.values()]
        middle, height = mean(x), mean(y)
        slope = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)
        return math.exp(height - slope * middle), -slope

    @property
    def is_in_time(self) -> bool:
        """Return whether every training took the seconds of its class."""
        return all(abs(s / c - 1) <= TOLERANCE for c, each in self.seconds.items() for s in each)

    def told(self) -> dict[str, Any]:
        a, k = self.trend
        return {
            "batch": self.batch,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "rates": self.rates.told(),
            "bits_per_byte": {f"{c:g} s": each for c, each in self.bits.items()},
            "seconds": {f"{c:g} s": each for c, each in self.seconds.items()},
            "in_time": self.is_in_time,
            "trend": {"a": round(a, 5), "k": round(k, 5)},
        }


def scaled(
    contenders: Sequence[Contender],
    trials: Trials,
    *,
    classes: Sequence[float] = CLASSES,
    seeds: int = 1,
    least: int = 3,
    most: int = 5,
) -> dict[str, Scale]:
    """Return each contender's scale. Rates are tuned at the shortest class, all with the same number of trials."""
    assert len(set(classes)) > 1, "a trend needs two classes"
    speed = {one.name: _fastest(one, trials) for one in contenders}
    by_name = {one.name: one for one in contenders}

    def run(name: str, seconds: float, rate: float, seed: int) -> Mapping[str, float]:
        batch, tokens_per_s = speed[name]
        tokens = round(tokens_per_s * seconds)
        key = f"{name}, class {seconds:g} s, {batch} sequences, rate {rate:.4g}, seed {seed}"
        found: Mapping[str, float] = trials(key, lambda: dict(by_name[name].train(batch, tokens, rate, seed)))
        return found

    def score(name: str) -> Callable[[float], float]:
        return lambda rate: float(run(name, min(classes), rate, 0)["bits_per_byte"])

    starts = {one.name: one.rate for one in contenders}
    grids = tuned({name: score(name) for name in by_name}, starts, least=least, most=most)
    found = {}
    for name, grid in grids.items():
        runs = {c: [run(name, c, grid.best, seed) for seed in range(seeds)] for c in sorted(classes)}
        bits, seconds = (
            {c: [one[key] for one in each] for c, each in runs.items()} for key in ("bits_per_byte", "seconds")
        )
        found[name] = Scale(*speed[name], grid, bits, seconds)
    return found


def crossing(one: Scale, other: Scale) -> float:
    """Return the class in seconds at which both trends meet; infinity for trends that are parallel."""
    (a, k), (other_a, other_k) = one.trend, other.trend
    if k == other_k:
        return math.inf
    power = math.log(a / other_a) / (k - other_k)
    return math.exp(power) if power < 700 else math.inf


def _fastest(one: Contender, trials: Trials) -> tuple[int, float]:
    speeds = {
        batch: float(trials(f"{one.name}, throughput of {batch} sequences", lambda batch=batch: one.throughput(batch)))
        for batch in one.batches
    }
    best = max(speeds, key=lambda batch: speeds[batch])
    return best, speeds[best]
