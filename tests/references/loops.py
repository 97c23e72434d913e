"""When replicas meet, in float64: at every step, or as islands that train apart (see gossamer.sync)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gossamer.comm.random_key import key_at
from gossamer.ops.random_signs import signed_sums
from references.exchanges import Code, Exchange, Mean, Met, TwoShot, e5m2, largest
from references.outer import Average
from references.rules import Rule
from references.task import Task, Vector

Rules = Callable[[Task], Rule]
Outers = Callable[[], Average]
CPU = torch.device("cpu")


def shares(of: Sequence[float]) -> list[float]:
    return [one / sum(of) for one in of]


def together(task: Task, rule: Rules, exchange: Exchange | None = None) -> Vector:
    """All gradients meet at every step."""
    x, held, meets = task.start(), rule(task), exchange or Mean()
    for step in range(task.steps):
        x = held.move(x, met(task, meets, x, step), task.rate(step), step + 1, apart=False)
    return x


def met(task: Task, exchange: Exchange, x: Vector, step: int) -> Vector:
    """The mean gradient of a step in which all meet, clipped."""
    found = [task.gradient(x, step, [rank]) for rank in range(len(task.rows))]
    w = shares([labels for _, labels in found])
    return task.clipped(exchange.meet([g for g, _ in found], w, task.factor(step), step)[0])


@dataclass
class Island:
    """Some ranks, whose gradients meet at every step: one model. `updates`: that it has made."""

    task: Task
    ranks: Sequence[int]
    x: Vector
    rule: Rule
    updates: int = 0

    def move(self, step: int, rate: float) -> float:
        """A step of its own; the labels that it saw."""
        g, labels = self.task.gradient(self.x, step, self.ranks)
        self.updates += 1
        self.x = self.rule.move(self.x, self.task.clipped(g), rate, self.updates, apart=True)
        return labels

    def follow(self, x: Vector, g: Vector, rate: float) -> None:
        """A step in which all gradients have met."""
        self.updates += 1
        self.x = self.rule.move(x, g, rate, self.updates, apart=False)


def landed(task: Task, groups: Sequence[Sequence[int]], rule: Rules) -> list[Island]:
    return [Island(task, ranks, task.start(), rule(task)) for ranks in groups]


@dataclass
class Fragment:
    """A part of the model that is exchanged by itself. `places`: of its numbers."""

    places: np.ndarray
    outer: Average
    labels: list[float]
    rates: float = 0.0
    steps: int = 0
    rounds: int = 0
    since: int = -1  # when it was sent that is under way
    sent: tuple[Vector, float, int] | None = None  # mean displacement, rates, steps
    left: list[Vector] = field(default_factory=list)  # where the islands were then
    told: Vector | None = None  # second moments under way


@dataclass(frozen=True)
class Apart:
    """DiLoCo and what it is with other settings: of the field's names in gossamer.sync.diloco."""

    outer: Outers
    every: int
    fragments: tuple[tuple[str, ...], ...] = ()
    delay: int = 0
    mix: float = 0.0
    carry: bool = False
    start: int = 0
    tells: tuple[int, ...] = ()  # the rounds with which second moments go
    exchange: Callable[[], Exchange] = Mean

    def run(self, task: Task, groups: Sequence[Sequence[int]], rule: Rules) -> Vector:
        islands, a, exchange = landed(task, groups, rule), task.start(), self.exchange()
        parts = [task.places(*one) for one in self.fragments] or [np.arange(len(a))]
        pieces = [Fragment(places, self.outer(), [0.0] * len(groups)) for places in parts]
        for step in range(task.steps):
            done, last = step + 1, step + 1 == task.steps
            if step < self.start:
                g = met(task, Mean(), a, step)
                for island in islands:
                    island.follow(a, g, task.rate(step))
                a = islands[0].x.copy()
                continue
            rate = task.rate(step) * float(np.mean([p.outer.factor for p in pieces]))
            seen = [island.move(step, rate) for island in islands]
            for piece in pieces:
                piece.rates, piece.steps = piece.rates + rate, piece.steps + 1
                piece.labels = [n + more for n, more in zip(piece.labels, seen, strict=True)]
            for piece in pieces:
                if piece.sent and (last or done - piece.since >= self.delay):
                    self._land(piece, islands, a)
            turn = [p for i, p in enumerate(pieces) if last or self._sends(i, len(pieces), done)]
            for piece in turn:
                self._leave(piece, islands, a, done, exchange, last=last)
            for piece in turn:
                if last or not self.delay:
                    self._land(piece, islands, a, final=last)
        return a

    def _sends(self, index: int, count: int, done: int) -> bool:
        since = done - self.start - index * self.every // count
        return done > self.start and since >= 0 and since % self.every == 0

    def _leave(
        self, piece: Fragment, islands: list[Island], a: Vector, done: int, exchange: Exchange, *, last: bool
    ) -> None:
        w, at = shares(piece.labels), piece.places
        gone = [a[at] - island.x[at] for island in islands]
        piece.sent, piece.since = (exchange.meet(gone, w, 1.0, done)[0], piece.rates, piece.steps), done
        piece.left = [island.x[at].copy() for island in islands]
        if piece.told is not None:
            for island in islands:
                island.rule.learn(piece.told, at)
            piece.told = None
        if piece.rounds in self.tells and not last:
            known = [island.rule.squares(island.updates)[at] for island in islands]
            piece.told, _ = TwoShot(e5m2).meet(known, w, 1.0, done)
        piece.labels, piece.rates, piece.steps = [0.0] * len(islands), 0.0, 0
        piece.rounds += 1

    def _land(self, piece: Fragment, islands: list[Island], a: Vector, *, final: bool = False) -> None:
        assert piece.sent is not None
        at, (d, rates, steps) = piece.places, piece.sent
        a[at] = piece.outer.step(a[at], d, rates, steps)
        for island, left in zip(islands, piece.left, strict=True):
            carried = island.x[at] - left if self.carry and not final else 0.0
            mix = 0.0 if final else self.mix
            island.x[at] = mix * island.x[at] + (1 - mix) * (a[at] + carried)
        piece.sent = None


@dataclass(frozen=True)
class Co2:
    """The displacement of a round is under way in the whole next one."""

    outer: Outers
    every: int

    def run(self, task: Task, groups: Sequence[Sequence[int]], rule: Rules) -> Vector:
        islands, a, outer = landed(task, groups, rule), task.start(), self.outer()
        late: Vector | None = None
        labels = [0.0] * len(groups)
        for step in range(task.steps):
            labels = [n + i.move(step, task.rate(step)) for n, i in zip(labels, islands, strict=True)]
            last = step + 1 == task.steps
            if (step + 1) % self.every and not last:
                continue
            d, _ = Mean().meet([a - i.x for i in islands], shares(labels), 1.0, step)
            labels = [0.0] * len(groups)
            if late is not None:
                a = outer.step(a, late, 0.0, 0.0)
            late = d
            if last:
                a = outer.step(a, late, 0.0, 0.0)
            for island in islands:
                island.x = a.copy()
        return a


@dataclass(frozen=True)
class Cser:
    """Error reset: what `each` loses of a step stays in the island, until `exchange` brings it together."""

    every: int
    each: float  # fractions of the largest numbers
    exchange: float

    def run(self, task: Task, groups: Sequence[Sequence[int]], rule: Rules) -> Vector:
        islands = landed(task, groups, rule)
        e = [np.zeros_like(i.x) for i in islands]
        labels = [0.0] * len(groups)
        for step in range(task.steps):
            before = [i.x for i in islands]
            seen = [i.move(step, task.rate(step)) for i in islands]
            labels = [n + more for n, more in zip(labels, seen, strict=True)]
            moves = [b - i.x for b, i in zip(before, islands, strict=True)]
            mean, lost = self._psync(moves, seen, self.each)
            for k, island in enumerate(islands):
                island.x, e[k] = before[k] - mean - lost[k], e[k] - lost[k]
            last = step + 1 == task.steps
            if (step + 1) % self.every == 0 or last:
                mean, lost = self._psync(e, labels, 1.0 if last else self.exchange)
                for k, island in enumerate(islands):
                    island.x, e[k] = island.x + mean + lost[k] - e[k], lost[k]
                labels = [0.0] * len(groups)
        return islands[0].x

    @staticmethod
    def _psync(vs: Sequence[Vector], labels: Sequence[float], fraction: float) -> Met:
        kept = [largest(v, fraction) for v in vs]
        mean = sum(p * c for p, c in zip(shares(labels), kept, strict=True))
        return mean, [v - c for v, c in zip(vs, kept, strict=True)]  # type: ignore[return-value]


@dataclass(frozen=True)
class Gossip:
    """Every island mixes what it knows of its neighbors on a ring of three; every `full` rounds all meet."""

    every: int
    full: int
    gamma: float = 1.0
    code: Code | None = None  # CHOCO: the difference to what is known travels in it

    def run(self, task: Task, groups: Sequence[Sequence[int]], rule: Rules) -> Vector:
        islands = landed(task, groups, rule)
        a, labels, rounds = task.start(), [0.0] * len(groups), 0
        known = [np.zeros_like(a) for _ in groups]
        for step in range(task.steps):
            labels = [n + i.move(step, task.rate(step)) for n, i in zip(labels, islands, strict=True)]
            last = step + 1 == task.steps
            if (step + 1) % self.every and not last:
                continue
            w, rounds = shares(labels), rounds + 1
            labels = [0.0] * len(groups)
            if last or rounds % self.full == 0:
                a = sum(p * i.x for p, i in zip(w, islands, strict=True))  # type: ignore[assignment]
                known = [np.zeros_like(a) for _ in groups]
                for island in islands:
                    island.x = a.copy()
                continue
            gone = [a - i.x for i in islands]
            code = self.code
            known = gone if code is None else [h + code(d - h) for h, d in zip(known, gone, strict=True)]
            for i, island in enumerate(islands):
                row = [min(w[i], p) / w[i] / 3 for p in w]
                row[i] += 1 - sum(row)
                pull = sum(p * h for p, h in zip(row, known, strict=True)) - known[i]
                island.x = a - (gone[i] + self.gamma * pull)
        return a


@dataclass(frozen=True)
class ZeroOne:
    """All gradients meet in the steps `meets`; what is moved between two of them is a round of its own, until `start`;
    then rounds end after the steps `ends`.
    """

    exchange: Callable[[], Exchange]
    meets: tuple[int, ...]
    start: int
    ends: tuple[int, ...]

    def run(self, task: Task, groups: Sequence[Sequence[int]], rule: Rules) -> Vector:
        islands, a, exchange = landed(task, groups, rule), task.start(), self.exchange()
        labels, rates = [0.0] * len(groups), 0.0
        for step in range(task.steps):
            rate, done = task.rate(step), step + 1
            if step in self.meets:
                g = met(task, Mean(), a, step)
                for island in islands:
                    island.follow(a, g, rate)
                a = islands[0].x.copy()
                continue
            labels = [n + i.move(step, rate) for n, i in zip(labels, islands, strict=True)]
            rates += rate
            if not (done <= self.start or done in self.ends or done == task.steps):
                continue
            d, _ = exchange.meet([a - i.x for i in islands], shares(labels), 1.0, step)
            a = a - d
            for island in islands:
                island.x = a.copy()
                island.rule.meet(a, d, rates)
            labels, rates = [0.0] * len(groups), 0.0
        return a


@dataclass(frozen=True)
class OneByte:
    """Slopes along random signs, in a byte each; the clip bounds every one of them."""

    samples: int
    epsilon: float

    def run(self, task: Task) -> Vector:
        x = task.start()
        for step in range(task.steps):
            seen = [task.loss(x, step, rank)[1] for rank in range(len(task.rows))]
            moved = np.zeros_like(x)
            for rank, share in enumerate(shares(seen)):
                for number in range(rank * self.samples, (rank + 1) * self.samples):
                    z = self._direction(task, step, number)
                    ahead, behind = (task.loss(x + way * self.epsilon * z, step, rank)[0] for way in (1, -1))
                    slope = one_byte((ahead - behind) / (2 * self.epsilon), self._draw(step, number))
                    moved += share / self.samples * np.clip(slope, -task.clip, task.clip) * z
            x = x - task.rate(step) * moved
        return x

    @staticmethod
    def _direction(task: Task, step: int, number: int) -> Vector:
        found = []
        for name, (at, _) in task.spans().items():
            key = key_at((0, step, name, "direction"), number).own
            found += [piece.double().numpy() for _, piece in signed_sums(at.stop - at.start, [(key, 1.0)], CPU)]
        return np.concatenate(found)

    @staticmethod
    def _draw(step: int, number: int) -> float:
        return key_at((0, step, "byte"), number).own / 2**63


def one_byte(value: float, draw: float) -> float:
    """Rounded up or down at random to a sign, five bits of exponent and two of mantissa."""
    size = abs(value)
    quarter = 2.0 ** (max(math.floor(math.log2(size)), -15) - 2) if size else 1.0
    return math.copysign((math.floor(size / quarter) + (draw < size / quarter % 1)) * quarter, value)
