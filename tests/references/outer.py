"""Outer rules in float64: how the anchor moves by the mean displacement of a round (see gossamer.sync.outer)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from references.task import Vector


@dataclass
class Average:
    """`rates`: the sum of the learning rates of the round's `steps`."""

    factor: float = 1.0  # on the islands' own rates

    def step(self, a: Vector, d: Vector, rates: float, steps: float) -> Vector:
        return a - d


@dataclass
class Nesterov(Average):
    lr: float = 0.7
    mu: float = 0.9
    m: Vector | float = 0.0

    def step(self, a: Vector, d: Vector, rates: float, steps: float) -> Vector:
        self.m = self.mu * self.m + d
        return a - self.lr * (d + self.mu * self.m)


@dataclass
class SlowMomentum(Average):
    lr: float = 1.0
    beta: float = 0.7
    u: Vector | float = 0.0

    def step(self, a: Vector, d: Vector, rates: float, steps: float) -> Vector:
        self.u = self.beta * self.u + d / rates
        return a - self.lr * rates * self.u


@dataclass
class SignMomentum(Average):
    lr: float = 1.0
    b1: float = 0.95
    b2: float = 0.98
    decay: float = 0.0
    m: Vector | float = 0.0

    def step(self, a: Vector, d: Vector, rates: float, steps: float) -> Vector:
        u = self.b1 * self.m + (1 - self.b1) * d / rates
        self.m = self.b2 * self.m + (1 - self.b2) * d / rates
        return a - self.lr * rates / steps * (np.sign(u) + self.decay * a)


@dataclass
class StaleMomentum(Average):
    """What arrives is a round old: it counts less, the further the anchor has gone since."""

    lr: float = 1.0
    mu: float = 0.5
    gap: float = 1.0
    clip: float = math.inf
    m: Vector | float = 0.0
    before: Vector | None = None

    def step(self, a: Vector, d: Vector, rates: float, steps: float) -> Vector:
        went = np.linalg.norm(a - self.before) if self.before is not None else 0.0
        self.m = np.clip(self.mu * self.m + d / (1 + self.gap * went / np.linalg.norm(d)), -self.clip, self.clip)
        self.before = a
        return a - self.lr * self.m


@dataclass
class Hypergradient(Average):
    """An averaging round's own rate (`inner` False), or the islands'."""

    inner: bool = False
    kappa: float = 0.2
    low: float = 0.2
    high: float = 5.0
    log: float = 0.0
    before: Vector | None = None

    def step(self, a: Vector, d: Vector, rates: float, steps: float) -> Vector:
        if self.before is not None:
            cosine = float(d @ self.before / np.linalg.norm(d) / np.linalg.norm(self.before))
            self.log = min(max(self.log + self.kappa * cosine, math.log(self.low)), math.log(self.high))
        self.before = d
        self.factor = math.exp(self.log) if self.inner else 1.0
        return a - (1.0 if self.inner else math.exp(self.log)) * d
