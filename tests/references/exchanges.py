"""How vectors of several ranks meet, in float64. Every exchange also says what of each rank's own it lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from references.task import Vector

Code = Callable[[Vector], Vector]  # there and back
Met = tuple[Vector, list[Vector]]  # the mean, and by rank what was lost of its own


class Exchange:
    def meet(self, xs: Sequence[Vector], w: Sequence[float], lr: float, step: int) -> Met:
        """`w`: shares, which sum to 1; `lr`: the factor on the rule's rate."""
        raise NotImplementedError


@dataclass
class Mean(Exchange):
    def meet(self, xs: Sequence[Vector], w: Sequence[float], lr: float, step: int) -> Met:
        return sum(p * x for p, x in zip(w, xs, strict=True)), [0 * x for x in xs]  # type: ignore[return-value]


@dataclass
class TopK(Exchange):
    fraction: float

    def meet(self, xs: Sequence[Vector], w: Sequence[float], lr: float, step: int) -> Met:
        kept = [largest(x, self.fraction) for x in xs]
        return sum(p * k for p, k in zip(w, kept, strict=True)), [x - k for x, k in zip(xs, kept, strict=True)]  # type: ignore[return-value]


def largest(x: Vector, fraction: float) -> Vector:
    places = np.argsort(-np.abs(x), kind="stable")[: max(1, round(fraction * len(x)))]
    kept = np.zeros_like(x)
    kept[places] = x[places]
    return kept


@dataclass
class TwoShot(Exchange):
    """Everybody is the owner of a part, sums what came encoded with its own, and tells that in code."""

    code: Code

    def meet(self, xs: Sequence[Vector], w: Sequence[float], lr: float, step: int) -> Met:
        chunk = -(-len(xs[0]) // len(xs))
        mean, lost = np.zeros_like(xs[0]), [0 * x for x in xs]
        for owner in range(len(xs)):
            part = slice(owner * chunk, min((owner + 1) * chunk, len(mean)))
            summed = w[owner] * xs[owner][part]
            for rank, x in enumerate(xs):
                if rank != owner:
                    told = self.code(x[part])
                    summed, lost[rank][part] = summed + w[rank] * told, x[part] - told
            mean[part] = self.code(summed)
            lost[owner][part] = (summed - mean[part]) / w[owner]
        return mean, lost


def sign(x: Vector) -> Vector:
    """One bit a number, in blocks of 1024."""
    blocks = np.split(x, range(1024, len(x), 1024))
    return np.concatenate([np.where(b >= 0, 1.0, -1.0) * np.abs(b).mean() for b in blocks])


def e5m2(x: Vector) -> Vector:
    """Three significant bits, five of exponent, and a power of two for every 256 numbers."""
    found = []
    for block in np.split(x, range(256, len(x), 256)):
        most = np.abs(block).max()
        scale = 2.0 ** (np.floor(np.log2(most)) - 14) if most else 1.0
        y = block / scale
        exponent = np.maximum(np.floor(np.log2(np.where(y == 0, 1.0, np.abs(y)))), -14)
        found.append(np.round(y / 2 ** (exponent - 2)) * 2 ** (exponent - 2) * scale)
    return np.concatenate(found)


@dataclass
class Feedback(Exchange):
    """What is lost of a rank's own goes with its next; `e` in units of what the parameters are still owed."""

    inner: Exchange
    track_lr: bool = True
    e: list[Vector] = field(default_factory=list)

    def meet(self, xs: Sequence[Vector], w: Sequence[float], lr: float, step: int) -> Met:
        units = [p * (lr if self.track_lr else 1.0) for p in w]
        owed = self.e or [0 * x for x in xs]
        sent = [x + e / u for x, e, u in zip(xs, owed, units, strict=True)]
        mean, lost = self.inner.meet(sent, w, lr, step)
        self.e = [u * one for u, one in zip(units, lost, strict=True)]
        return mean, [0 * x for x in xs]


@dataclass
class Momentum(Exchange):
    """The momentum travels, and what is told of it is turned back into a gradient."""

    inner: Exchange
    beta: float = 0.9
    m: Vector | float = 0.0

    def meet(self, xs: Sequence[Vector], w: Sequence[float], lr: float, step: int) -> Met:
        before = self.m
        self.m, lost = self.inner.meet([self.beta * before + (1 - self.beta) * x for x in xs], w, lr, step)
        return (self.m - self.beta * before) / (1 - self.beta), [one / (1 - self.beta) for one in lost]


@dataclass
class WarmUp(Exchange):
    inner: Exchange
    steps: int

    def meet(self, xs: Sequence[Vector], w: Sequence[float], lr: float, step: int) -> Met:
        return (Mean() if step < self.steps else self.inner).meet(xs, w, lr, step)
