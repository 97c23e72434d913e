"""The search for the buckets, in the order of readiness, at which each candidate exchange begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gossamer.plan.exchange.measurements import BucketMeasurements, StepMeasurements
from gossamer.plan.exchange.step_tasks import PER_BUCKET, backward_pass, decode_task, send_tasks, step_seconds
from gossamer.spec.clock import Clock, TimedTask

_PRICE = 0.1  # of a step: the saving that compensates for deferring all of its gradient
_Borders = tuple[int, ...]  # by candidate but the first: the bucket at which it begins; ascending
_T = TypeVar("_T")


def lost_of(bucket: BucketMeasurements, candidate: int) -> float:
    """Return the part of |x|^2 of a step's gradient that a candidate defers for a bucket."""
    option = bucket.options[candidate]
    assert option is not None, "a candidate that serves the bucket"
    return bucket.weight * option.loss


def dearer_of(lost: Iterable[float]) -> float:
    """Return the fraction of a step that the compression error of all buckets costs."""
    return _PRICE * sum(lost)


@dataclass(frozen=True, slots=True)
class _Column:
    """A candidate for every bucket, or the next weaker one where it cannot serve: numbers, tasks, errors."""

    picked: tuple[int, ...]
    sent: tuple[TimedTask, ...]  # PER_BUCKET of each bucket
    decoded: tuple[TimedTask, ...]
    lost: tuple[float, ...]

    @staticmethod
    def of(facts: StepMeasurements, usable: Sequence[int]) -> _Column:
        """Return the column of the last of the `usable` candidates."""
        order = usable[::-1]
        picked = tuple(next(c for c in order if bucket.options[c] is not None) for bucket in facts.buckets)
        sent, decoded = list[TimedTask](), list[TimedTask]()
        for number, (bucket, c) in enumerate(zip(facts.buckets, picked, strict=True)):
            option = bucket.options[c]
            assert option is not None
            sent += send_tasks(facts, number, option)
            decoded.append(decode_task(facts, number, option))
        lost = tuple(lost_of(bucket, c) for bucket, c in zip(facts.buckets, picked, strict=True))
        return _Column(picked, tuple(sent), tuple(decoded), lost)


@dataclass(slots=True)
class StepSearch:
    """The search for the best exchange of every bucket.

    The later a bucket is ready, the more of its exchange is exposed. So candidates follow in order, from exact to
    strongest, and the search is for the bucket where each begins. It moves one beginning after the other to its best
    bucket until none moves, at most as often as there are beginnings. It starts from every choice of a single candidate
    for all. Each choice is played once; those that differ from one bucket on share what was played before it.
    """

    facts: StepMeasurements
    columns: tuple[_Column, ...]  # by usable candidate, from exact to strongest
    known: dict[_Borders, float] = field(default_factory=dict)  # values

    @staticmethod
    def over(facts: StepMeasurements, usable: Sequence[int]) -> StepSearch:
        """Return the search over the candidates with the numbers `usable`; the first serves every bucket."""
        return StepSearch(facts, tuple(_Column.of(facts, usable[: level + 1]) for level in range(len(usable))))

    def picked(self, borders: _Borders) -> list[int]:
        """Return the number of the candidate of each bucket."""
        return self._joined([column.picked for column in self.columns], borders)

    def best(self) -> _Borders:
        """Return the best beginnings found."""
        ends, levels = len(self.facts.buckets), len(self.columns)
        starts = [tuple(0 if level < harsh else ends for level in range(levels - 1)) for harsh in range(levels)]
        return min((self.settled(one) for one in starts), key=self.value)

    def settled(self, borders: _Borders) -> _Borders:
        """Return the beginnings that moving one after the other reaches from `borders`."""
        best = self.value(borders)
        for _ in borders:
            before = best
            for level in range(len(borders)):
                tried = self._tried(borders, level)
                self._play(tried, level)
                value, place = min((self.value(one), i) for i, one in enumerate(tried))
                if value < best:
                    best, borders = value, tried[place]
            if best >= before:
                break
        return borders

    def value(self, borders: _Borders) -> float:
        """Return the seconds of a step, increased by the cost of its compression error."""
        if borders not in self.known:
            self.known[borders] = self._value(Clock(), borders)
        return self.known[borders]

    def _tried(self, borders: _Borders, level: int) -> list[_Borders]:
        """Return the beginnings with that of one level at every bucket between its neighbors."""
        low = borders[level - 1] if level else 0
        high = borders[level + 1] if level + 1 < len(borders) else len(self.facts.buckets)
        return [(*borders[:level], place, *borders[level + 1 :]) for place in range(low, high + 1)]

    def _play(self, tried: Sequence[_Borders], level: int) -> None:
        """Learn the values of beginnings that differ in one level, in ascending order: each shares its first buckets
        with those after it.
        """
        shared = Clock()
        for borders in tried:
            if borders not in self.known:
                shared.add(self._tasks(borders)[len(shared.tasks) : 1 + PER_BUCKET * borders[level]])
                self.known[borders] = self._value(shared.copy(), borders)

    def _value(self, clock: Clock, borders: _Borders) -> float:
        """Return the value of a choice of which `clock` has played the first tasks."""
        clock.add(self._tasks(borders)[len(clock.tasks) :])
        dearer = dearer_of(self._joined([column.lost for column in self.columns], borders))
        return step_seconds(self.facts, clock) * (1 + dearer)

    def _tasks(self, borders: _Borders) -> list[TimedTask]:
        sent = self._joined([column.sent for column in self.columns], [PER_BUCKET * at for at in borders])
        decoded = self._joined([column.decoded for column in self.columns], borders)
        return [backward_pass(self.facts), *sent, *decoded]

    def _joined(self, columns: Sequence[tuple[_T, ...]], borders: Sequence[int]) -> list[_T]:
        """Return the entries of each column from its beginning to that of the next."""
        edges = (0, *borders, len(columns[0]))
        return [one for level, column in enumerate(columns) for one in column[edges[level] : edges[level + 1]]]
