"""Update rules in float64, from their papers' equations (see the module of the same name in gossamer.optimizer)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from references.task import Task, Vector

NONE = np.zeros(0)


@dataclass
class Rule:
    """One island's. `t` counts the updates, from 1 on."""

    task: Task

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        raise NotImplementedError

    def meet(self, w: Vector, moved: Vector, rates: float) -> None:
        """Islands have met at `w`."""

    def squares(self, t: int) -> Vector:
        """What it tells the other islands after `t` updates."""
        return NONE

    def learn(self, squares: Vector, places: np.ndarray) -> None:
        """What all of them have told, of some numbers."""

    def decayed(self, w: Vector, by: float) -> Vector:
        return np.where(self.task.is_matrix(), w * (1 - by), w)

    def floored(self, v: Vector, floor: float) -> Vector:
        """sqrt(v), at least `floor` times its root mean square over the parameter."""
        h = np.sqrt(v)
        for at, _ in self.task.spans().values():
            h[at] = np.maximum(h[at], floor * np.sqrt(np.mean(v[at])))
        return h


@dataclass
class Sgd(Rule):
    momentum: float = 0.0
    m: Vector | float = 0.0

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        self.m = self.momentum * self.m + g
        return w - rate * self.m


@dataclass
class ProximalMcp(Sgd):
    """SGD, then the minimizer of MCP and the distance, of matrices alone."""

    strength: float = 0.05
    gamma: float = 3.0

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        w = super().move(w, g, rate, t, apart=apart)
        near = np.sign(w) * np.maximum(np.abs(w) - rate * self.strength, 0.0) / (1 - rate / self.gamma)
        return np.where(self.task.is_matrix() & (np.abs(w) <= self.gamma * self.strength), near, w)


@dataclass
class ProximalRows(Sgd):
    """SGD, then the group lasso of the rows of matrices."""

    strength: float = 0.02

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        w = super().move(w, g, rate, t, apart=apart).copy()
        for at, shape in self.task.spans().values():
            if len(shape) == 2:
                rows = w[at].reshape(shape)
                norms = np.linalg.norm(rows, axis=1, keepdims=True)
                w[at] = (rows * np.maximum(0.0, 1 - rate * self.strength * np.sqrt(shape[1]) / norms)).ravel()
        return w


@dataclass
class AdamW(Rule):
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    m: Vector | float = 0.0
    v: Vector | float = 0.0

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        w = self.decayed(w, rate * self.decay)
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        return w - rate * (self.m / (1 - self.b1**t)) / (np.sqrt(self.v / (1 - self.b2**t)) + self.eps)


@dataclass
class CommonAdamW(AdamW):
    """AdamW that divides by what all islands know; `part` of all samples is this one's."""

    part: float = 0.5
    common: Vector = field(default_factory=lambda: NONE)

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        if not apart:
            w = super().move(w, g, rate, t, apart=False)
            self.common = self.squares(t)
            return w
        w = self.decayed(w, rate * self.decay)
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * self.part * g**2
        own = self.squares(t)
        common = self.common if len(self.common) else np.zeros_like(w)
        h = np.where(common > 0, np.maximum(common, self.part * own), own)
        return w - rate * (self.m / (1 - self.b1**t)) / (np.sqrt(h) + self.eps)

    def squares(self, t: int) -> Vector:
        return np.asarray(self.v / (1 - self.b2**t))

    def learn(self, squares: Vector, places: np.ndarray) -> None:
        if not len(self.common):
            self.common = np.zeros_like(self.v)
        self.common[places] = squares


@dataclass
class OneBitAdam(AdamW):
    """Adam whose second moment stays after `freeze` updates."""

    freeze: int = 5
    floor: float = 0.05

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        if t <= self.freeze:
            return super().move(w, g, rate, t, apart=False)
        w = self.decayed(w, rate * self.decay)
        self.m = self.b1 * self.m + (1 - self.b1) * g
        h = self.floored(self.v / (1 - self.b2**self.freeze), self.floor)
        moved = (self.m / (1 - self.b1**t)) / (h + self.eps)
        return w - rate * np.where(self.v > 0, moved, 0.0)


@dataclass
class ZeroOneAdam(AdamW):
    """Its second moment follows gradients that all share; its momentum becomes what came of a round."""

    floor: float = 0.05
    w1: float = 0.0
    w2: float = 0.0

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        self.m, self.w1 = self.b1 * self.m + (1 - self.b1) * g, self.b1 * self.w1 + 1 - self.b1
        if not apart:
            self.v, self.w2 = self.b2 * self.v + (1 - self.b2) * g**2, self.b2 * self.w2 + 1 - self.b2
        moved = np.where(self.v > 0, (self.m / self.w1) / self._below(self.floor if apart else 0.0), 0.0)
        return self.decayed(w, rate * self.decay) - rate * moved

    def meet(self, w: Vector, moved: Vector, rates: float) -> None:
        own = moved / rates - np.where(self.task.is_matrix(), self.decay * (w + moved), 0.0)
        self.m, self.w1 = np.where(self.v > 0, own * self._below(self.floor), 0.0), 1.0

    def _below(self, floor: float) -> Vector:
        return self.floored(self.v / self.w2, floor) + self.eps


@dataclass
class Layered(Rule):
    """What looks at one parameter at a time."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    decay: float = 0.01
    largest: float = 10.0
    kept: dict[str, dict[str, Vector]] = field(default_factory=dict)

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        w = w.copy()
        for name, (at, shape) in self.task.spans().items():
            kept = self.kept.setdefault(name, {})
            w[at] -= self.by(kept, w[at], g[at], rate, t, adapts=len(shape) >= 2)
        return w

    def by(self, kept: dict, w: Vector, g: Vector, rate: float, t: int, *, adapts: bool) -> Vector:
        raise NotImplementedError

    def moments(self, kept: dict, g: Vector, t: int) -> tuple[Vector, Vector]:
        kept["m"] = self.b1 * kept.get("m", 0.0) + (1 - self.b1) * g
        kept["v"] = self.b2 * kept.get("v", 0.0) + (1 - self.b2) * g**2
        return kept["m"] / (1 - self.b1**t), np.sqrt(kept["v"] / (1 - self.b2**t)) + self.eps

    def ratio(self, w: Vector, u: Vector) -> float:
        size, length = np.linalg.norm(w), np.linalg.norm(u)
        return float(min(size, self.largest) / length) if size and length else 1.0


@dataclass
class Lamb(Layered):
    def by(self, kept: dict, w: Vector, g: Vector, rate: float, t: int, *, adapts: bool) -> Vector:
        m, below = self.moments(kept, g, t)
        u = m / below + (self.decay * w if adapts else 0.0)
        kept["ratio"] = self.ratio(w, u) if adapts else 1.0
        return rate * kept["ratio"] * u


@dataclass
class Lans(Layered):
    def by(self, kept: dict, w: Vector, g: Vector, rate: float, t: int, *, adapts: bool) -> Vector:
        g = g / np.linalg.norm(g)
        m, below = self.moments(kept, g, t)
        slow, fast = m / below, g / below
        if adapts:
            slow, fast = slow + self.decay * w, fast + self.decay * w
            slow, fast = self.ratio(w, slow) * slow, self.ratio(w, fast) * fast
        return rate * (self.b1 * slow + (1 - self.b1) * fast)


@dataclass
class Lars(Layered):
    momentum: float = 0.9
    trust: float = 0.02
    decay: float = 5e-4

    def by(self, kept: dict, w: Vector, g: Vector, rate: float, t: int, *, adapts: bool) -> Vector:
        if adapts:
            g = g + self.decay * w
            g = g * self.trust * np.linalg.norm(w) / np.linalg.norm(g)
        kept["m"] = self.momentum * kept.get("m", 0.0) + rate * g
        return kept["m"]


@dataclass
class Muon(Rule):
    """Matrices by the orthogonal factor of their momentum, the embedding and others by AdamW, `rest` times as fast."""

    rest: float = 0.5
    u: float = 0.95
    decay: float = 0.1
    held: dict[str, Vector] = field(default_factory=dict)
    others: AdamW | None = None

    def move(self, w: Vector, g: Vector, rate: float, t: int, *, apart: bool) -> Vector:
        self.others = self.others or AdamW(self.task)
        found = self.others.move(w, g, rate * self.rest, t, apart=apart)
        for name, (at, shape) in self.task.spans().items():
            if len(shape) != 2 or "embed" in name:
                continue
            held = self.held[name] = self.u * self.held.get(name, 0.0) + (1 - self.u) * g[at]
            x = ((1 - self.u) * g[at] + self.u * held).reshape(shape)
            factor = 0.2 * np.sqrt(max(shape)) * self.orthogonal(x)
            found[at] = w[at] * (1 - rate * self.decay) - rate * factor.ravel()
        return found

    def orthogonal(self, x: Vector) -> Vector:
        if x.shape[0] > x.shape[1]:
            return self.orthogonal(x.T).T
        x = x / np.linalg.norm(x)
        for _ in range(5):
            y = x @ x.T
            x = 3.4445 * x - 4.775 * y @ x + 2.0315 * y @ y @ x
        return x


@dataclass
class OneBitLamb(Lamb):
    """LAMB, then its second moments and ratios as they were at `freeze`, but for what the momentum tells."""

    freeze: int = 5
    b3: float = 0.9
    least: float = 0.5
    most: float = 4.0
    change: float = 0.1
    floor: float = 0.05

    def by(self, kept: dict, w: Vector, g: Vector, rate: float, t: int, *, adapts: bool) -> Vector:
        if t <= self.freeze:
            moved = super().by(kept, w, g, rate, t, adapts=adapts)
            kept["c"] = self.b3 * kept.get("c", 0.0) + (1 - self.b3) * kept["ratio"]
            kept["fresh"], kept["r"] = kept["v"].copy(), 1.0
            return moved
        kept["m"] = self.b1 * kept["m"] + (1 - self.b1) * g
        kept["fresh"] = self.b2 * kept["fresh"] + (1 - self.b2) * g**2
        h = self._rooted(kept["v"] / (1 - self.b2**self.freeze))
        adam = np.where(kept["v"] > 0, (kept["m"] / (1 - self.b1**t)) / (h + self.eps), 0.0)
        if not adapts:
            return rate * adam
        u = adam + self.decay * w
        part = min(1.0, float(np.linalg.norm(adam) / np.linalg.norm(u)))
        now = self._rooted(kept["fresh"] / (1 - self.b2**t))
        r = part * float(np.max((h + self.eps) / (now + self.eps))) + 1 - part
        r = min(max(r, self.least), self.most)
        kept["r"] = min(max(r, kept["r"] * (1 - self.change)), kept["r"] * (1 + self.change))
        return rate * kept["r"] * kept["c"] / (1 - self.b3**self.freeze) * u

    def _rooted(self, v: Vector) -> Vector:
        return np.maximum(np.sqrt(v), self.floor * np.sqrt(np.mean(v)))
