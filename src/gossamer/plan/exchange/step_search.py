"""The search for the buckets of a step and their exchanges: short steps first, then little loss.

A `Mixture` gives every bucket of one cut a candidate. The search times every candidate alone on every cut (skipping
those whose lower bound is too long already), then lets milder candidates serve the buckets that are full early, as
these overlap the backward pass. Of all mixtures at most `SLACK` longer than the shortest, it takes the one that loses
least, and of those alike in that the one with the fewest buckets. Its work is linear in buckets, as borders are
searched on few merged buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise

from gossamer.comm.channel import UNDER_WAY
from gossamer.plan.exchange.measurements import BucketMeasurements, StepMeasurements
from gossamer.plan.exchange.send_order import Flight, Job, SendSchedule, job_of, least_seconds, schedule_jobs

SLACK = 0.02  # of the shortest step: how much longer a mixture that loses less may take; forecasts err by more
_STARTS = 2  # candidates from which mixtures are made
_MERGED, _SINGLE = 64, 32  # at most so many merged early buckets, and so many late ones as they are
_WORTH_A_RULE = 0.02  # of the elements: the least that a candidate of its own is worth
_BARS = 8  # borders tried at first


@dataclass(frozen=True)
class Column:
    """A candidate for every bucket of a cut, or the next weaker usable one where it cannot serve.

    `picked`: the candidate of each bucket. `lost`: the part of a step's |x|^2 that each bucket loses.
    """

    picked: tuple[int, ...]
    jobs: tuple[Job, ...]
    lost: tuple[float, ...]

    @staticmethod
    def picked_for(facts: StepMeasurements, picked: tuple[int, ...]) -> Column:
        """Return the column with candidate `picked[b]` for bucket b."""
        served = [(bucket, bucket.option(c)) for bucket, c in zip(facts.buckets, picked, strict=True)]
        jobs = tuple(job_of(bucket.ready_s, option) for bucket, option in served)
        return Column(picked, jobs, tuple(bucket.weight * option.loss for bucket, option in served))

    def overlaid(self, facts: StepMeasurements, candidate: int) -> Column:
        """Return the column of `candidate`, with this one's candidates for the buckets that it cannot serve."""
        picked, jobs, lost = list(self.picked), list(self.jobs), list(self.lost)
        for b, bucket in enumerate(facts.buckets):
            if (option := bucket.options[candidate]) is not None:
                picked[b], jobs[b], lost[b] = candidate, job_of(bucket.ready_s, option), bucket.weight * option.loss
        return Column(tuple(picked), tuple(jobs), tuple(lost))


@dataclass(frozen=True)
class Mixture:
    """The candidate of each bucket of the cut `facts`, as found by the search."""

    facts: StepMeasurements
    columns: tuple[tuple[int, Column], ...]  # (first bucket, column), ascending; the first is 0

    @staticmethod
    def alone(facts: StepMeasurements, column: Column) -> Mixture:
        """Return the mixture of one candidate."""
        return Mixture(facts, ((0, column),))

    def on(self, facts: StepMeasurements) -> Mixture:
        """Return the same candidates with the times of other measurements of the same buckets."""
        return Mixture.picked_on(facts, self.picked)

    @staticmethod
    def picked_on(facts: StepMeasurements, picked: tuple[int, ...]) -> Mixture:
        """Return the mixture with candidate `picked[b]` for bucket b of `facts`."""
        return Mixture.alone(facts, Column.picked_for(facts, picked))

    @cached_property
    def picked(self) -> tuple[int, ...]:
        """Return the candidate of each bucket."""
        return tuple(c for low, high, column in self._spans() for c in column.picked[low:high])

    @cached_property
    def lost(self) -> float:
        """Return the part of a step's |x|^2 that the exchanges lose."""
        return sum(sum(column.lost[low:high]) for low, high, column in self._spans())

    @cached_property
    def schedule(self) -> SendSchedule:
        """Return the schedule of the step."""
        return schedule_jobs(self.facts, self._jobs)

    @cached_property
    def least_s(self) -> float:
        """Return a lower bound of the step's length."""
        return least_seconds(self.facts, self._jobs)

    @property
    def step_s(self) -> float:
        """Return the length of the step."""
        return self.schedule.step_s

    def step_or_bound_s(self, limit_s: float) -> float:
        """Return the length of the step, or a lower bound of it that is above `limit_s` already."""
        return self.least_s if self.least_s > limit_s else self.step_s

    @cached_property
    def _jobs(self) -> list[Job]:
        return [job for low, high, column in self._spans() for job in column.jobs[low:high]]

    def _spans(self) -> Iterator[tuple[int, int, Column]]:
        edges = [first for first, _ in self.columns] + [len(self.facts.buckets)]
        for (low, column), high in zip(self.columns, edges[1:], strict=True):
            yield low, high, column


@dataclass(frozen=True)
class SingleCandidates:
    """The mixtures of one candidate, made and timed once for all searches of a choice."""

    _made: dict[tuple[int, tuple[int, ...]], Mixture] = field(default_factory=dict)

    def of(self, facts: StepMeasurements, usable: Sequence[int]) -> Mixture:
        """Return that of the last of the `usable` candidates. Where one cannot serve, the one before it does.

        The first one serves every bucket.
        """
        key = id(facts), tuple(usable)  # `facts` live as long as the mixture
        if key not in self._made:
            *weaker, last = usable
            if not weaker:
                column = Column.picked_for(facts, (last,) * len(facts.buckets))
            elif all(bucket.options[last] is None for bucket in facts.buckets):
                return self._made.setdefault(key, self.of(facts, weaker))
            else:
                column = self.column(facts, weaker).overlaid(facts, last)
            self._made[key] = Mixture.alone(facts, column)
        return self._made[key]

    def column(self, facts: StepMeasurements, usable: Sequence[int]) -> Column:
        """Return the column of that mixture."""
        ((_, column),) = self.of(facts, usable).columns
        return column


def search(cuts: Sequence[StepMeasurements], usable: Sequence[int], singles: SingleCandidates) -> Mixture:
    """Return the best mixture of the candidates with the numbers `usable`, ascending from exact to strongest.

    `cuts`: the same gradients in buckets of several sizes. The first candidate serves every bucket.
    """
    levels = [usable[: level + 1] for level in range(len(usable))]
    columns = {id(facts): tuple(singles.column(facts, level) for level in levels) for facts in cuts}
    each = (singles.of(facts, level) for facts in cuts for level in levels)
    overlaid = (one for facts in cuts for one in _overlaid(facts, columns[id(facts)], usable))
    alone = _within_slack(chain(each, overlaid))
    starts = sorted(alone, key=lambda one: one.step_s)[:_STARTS]
    mixed = [better for one in starts for better in _mixed(one, columns[id(one.facts)])]
    limit_s = (1 + SLACK) * min(one.step_s for one in (*alone, *mixed))
    softened = [_softened(one, columns[id(one.facts)], limit_s) for one in (*starts, *mixed)]
    found = [one for one in (*alone, *mixed, *chain.from_iterable(softened)) if one.step_s <= limit_s]
    # Messages take processor time from the backward pass that no measurement before step 1 finds, so of mixtures that
    # lose alike and are forecast alike, the one of the fewest buckets.
    return min(found, key=lambda one: (one.lost, any(one.picked), len(one.facts.buckets), one.step_s))


def _overlaid(facts: StepMeasurements, columns: Sequence[Column], usable: Sequence[int]) -> Iterator[Mixture]:
    """Yield every column with each exact candidate that serves only some buckets, such as rows of embeddings, on those.

    A level has the next weaker candidate where its own cannot serve, which need not be the best beside it.
    """
    for candidate in usable:
        options = [bucket.options[candidate] for bucket in facts.buckets]
        served = [one for one in options if one is not None]
        if 0 < len(served) < len(options) and not any(one.loss for one in served):
            yield from (Mixture.alone(facts, column.overlaid(facts, candidate)) for column in columns)


def each_alone(
    cuts: Sequence[StepMeasurements], usable: Sequence[int], singles: SingleCandidates, *, within: float
) -> list[Mixture]:
    """Return each of the candidates with the numbers `usable` alone, on that of the `cuts` on which it is fastest.

    The first candidate serves the buckets that another cannot serve. `within`: of the shortest step, how much longer
    one may take to be returned. The shortest comes first.
    """
    alone = [[singles.of(facts, sorted({usable[0], c})) for facts in cuts] for c in usable]
    bounds = [min(one.least_s for one in each) for each in alone]
    found, best_s = list[Mixture](), float("inf")
    for least_s, each in sorted(zip(bounds, alone, strict=True), key=lambda pair: pair[0]):
        if least_s > (1 + within) * best_s:
            break
        found.append(min(_within_slack(each), key=lambda one: one.step_s))
        best_s = min(best_s, found[-1].step_s)
    return sorted((one for one in found if one.step_s <= (1 + within) * best_s), key=lambda one: one.step_s)


def _within_slack(mixtures: Iterable[Mixture]) -> list[Mixture]:
    """Return the mixtures that are at most the slack longer than the shortest; others are timed as far as needed."""
    found, best_s = list[Mixture](), float("inf")
    by_bound = sorted({id(one): one for one in mixtures}.values(), key=lambda one: one.least_s)
    for one in by_bound:
        if one.least_s > (1 + SLACK) * best_s:
            break
        best_s = min(best_s, one.step_s)
        found.append(one)
    return [one for one in found if one.step_s <= (1 + SLACK) * best_s]


def _mixed(start: Mixture, columns: Sequence[Column]) -> Iterator[Mixture]:
    """Yield the fastest mixture of a milder candidate for the early buckets and that of `start` for the rest, if any is
    faster.
    """
    ((_, harsh),), few = start.columns, _Merged.of(start.facts)
    end, late, best = len(few.facts.buckets), few.column(harsh), None
    best_s = Mixture.alone(few.facts, late).step_s
    for mild in columns:
        if mild.picked == harsh.picked:
            continue
        early = few.column(mild)
        tried = sorted({end * bar // _BARS for bar in range(1, _BARS + 1)})
        width = max(1, end // _BARS)
        while tried:
            times = {at: Mixture(few.facts, ((0, early), (at, late))).step_or_bound_s(best_s) for at in tried}
            at = min(times, key=lambda place: times[place])
            if times[at] < best_s:
                best_s, best = times[at], Mixture(start.facts, ((0, mild), (few.starts[at], harsh)))
            width //= 2
            tried = [place for place in (at - width, at + width) if width and 0 < place <= end]
    if best is not None:
        yield best


def _softened(start: Mixture, columns: Sequence[Column], limit_s: float) -> Iterator[Mixture]:
    """Yield `start` with milder candidates for as many early buckets as `limit_s` allows, if for any.

    First the one milder candidate that saves most of the loss; then still milder ones for the first of its buckets.
    """
    few, harsh = _Merged.of(start.facts), start.columns[-1][1]
    found = Mixture(few.facts, few.spans(start))
    limit_s *= max(1.0, found.step_s / start.step_s)  # merging costs a little
    milder = sorted((one for one in columns if sum(one.lost) < sum(harsh.lost)), key=lambda one: sum(one.lost))
    early = [few.column(one) for one in milder]
    last = len(found.columns) - 1
    softer = [one for mild in early if (one := _begun(found, last, mild, limit_s)) is not None]
    best = min(softer, key=lambda one: one.lost, default=found)
    place = 0
    for mild in early:
        if sum(mild.lost) >= sum(best.columns[place][1].lost):
            break
        if (softer_still := _begun(best, place, mild, limit_s)) is not None:
            best, place = softer_still, place + 1
    if best is not found:
        whole = {id(few_of): one for few_of, one in zip(early, milder, strict=True)}
        whole |= {id(few_of): one for (_, few_of), (_, one) in zip(found.columns, start.columns, strict=True)}
        yield Mixture(start.facts, tuple((few.starts[first], whole[id(one)]) for first, one in best.columns))


def _begun(mixture: Mixture, place: int, mild: Column, limit_s: float) -> Mixture | None:
    """Return `mixture` with `mild` for as many of the first buckets of its column `place` as `limit_s` allows.

    None where these are too few for a rule of their own.
    """
    before, (begin, column), after = mixture.columns[:place], mixture.columns[place], mixture.columns[place + 1 :]
    buckets, found = mixture.facts.buckets, None
    low, high = begin, after[0][0] if after else len(buckets)
    while low < high:
        at = (low + high + 1) // 2
        tried = Mixture(mixture.facts, (*before, (begin, mild), (at, column), *after))
        if tried.step_or_bound_s(limit_s) <= limit_s:
            low, found = at, tried
        else:
            high = at - 1
    share = sum(one.numel for one in buckets[begin:low])
    return found if share >= _WORTH_A_RULE * sum(one.numel for one in buckets) else None


@dataclass(frozen=True)
class _Merged:
    """A cut with its early buckets merged, so that a search need not time thousands of them again and again.

    `starts`: the first bucket of each merged one, and the number of all.
    """

    facts: StepMeasurements
    starts: tuple[int, ...]

    @staticmethod
    def of(facts: StepMeasurements) -> _Merged:
        """Merge all but the last buckets; a cut of few buckets stays as it is."""
        count = len(facts.buckets)
        early = max(0, count - _SINGLE)
        each = -(-early // _MERGED) if count > _MERGED + _SINGLE else 1
        starts = (*range(0, early, each), *range(early, count))
        edges = (*starts, count)
        merged = tuple(
            BucketMeasurements(
                (),
                sum(one.numel for one in facts.buckets[low:high]),
                facts.buckets[high - 1].ready_s,
                sum(one.weight for one in facts.buckets[low:high]),
                (),
            )
            for low, high in pairwise(edges)
        )
        return _Merged(replace(facts, buckets=merged), edges)

    def column(self, column: Column) -> Column:
        """Return the column of the merged buckets."""
        if len(self.starts) == len(column.jobs) + 1:
            return column
        spans = list(pairwise(self.starts))
        jobs = tuple(_merged_job(column.jobs[low:high]) for low, high in spans)
        lost = tuple(sum(column.lost[low:high]) for low, high in spans)
        return Column(tuple(column.picked[low] for low, _ in spans), jobs, lost)

    def spans(self, mixture: Mixture) -> tuple[tuple[int, Column], ...]:
        """Return the columns of a mixture whose borders are the first buckets of merged ones."""
        return tuple((self.starts.index(first), self.column(column)) for first, column in mixture.columns)


def _merged_job(jobs: Sequence[Job]) -> Job:
    """Return one job that takes the thread and the links as long as all of `jobs`.

    As many of their messages as may be under way wait at the same time.
    """
    if len(jobs) == 1:
        return jobs[0]
    longest = max(jobs, key=lambda job: len(job[2]))
    turns_s, messages = [0.0] * len(longest[1]), list[Flight]()
    for _, own, _ in jobs:
        for turn, seconds in enumerate(own):
            turns_s[turn if turn + 1 < len(own) else -1] += seconds
    for turn, (link, _, _, hops) in enumerate(longest[2]):
        parts = [job[2][turn] for job in jobs if turn < len(job[2])]
        busy_s, flights = sum(part[1] for part in parts), [part[2] * part[3] for part in parts]
        waits_s = max((busy_s + sum(flights)) / UNDER_WAY - busy_s, *flights)
        messages.append((link, busy_s, waits_s / hops, hops))
    return jobs[-1][0], tuple(turns_s), tuple(messages)
