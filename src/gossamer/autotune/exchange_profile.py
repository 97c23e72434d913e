"""Profile what the choice of exchanges needs besides links: when buckets fill, and each candidate's cost and error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.autotune.link_use import LARGEST_BUCKET_BYTES, sizes_of_buckets
from gossamer.autotune.rehearsed_gradients import lost_of, occupied_by, with_stand_ins
from gossamer.comm.bucket import Entry, Layout, divided, partition
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups, Traffic
from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.plan.exchange import (
    BucketMeasurements,
    Candidate,
    MessagePrice,
    Option,
    PricedMessage,
    RoundMeasurements,
    StepMeasurements,
    check_finite,
    cost_of_step,
    priced,
    tasks_of_step,
    wire_seconds,
)
from gossamer.recipe import ParameterRules
from gossamer.run.profile_step import StepProfile, encode_slowdown
from gossamer.spec.clock import play
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import told
from gossamer.spec.network import Network
from gossamer.spec.plan import BUCKET_BYTES
from gossamer.spec.row_range import whole_of
from gossamer.sync import OuterLoopConfig, exchange_of_second_moments, exchanges_of_round

_SAMPLED_RANKS = 16  # beyond, traffic is computed for the first and the last ranks only
_SAMPLED_OWNERS = 64  # of an island that all own a part: beyond, each stands for those behind it
_TIMED_BYTES = (1 << 18, 1 << 21, 1 << 24)  # buckets whose encoding is timed; that of others is interpolated
_FREE = MessagePrice()

_Groups: TypeAlias = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
_Alike: TypeAlias = tuple[object, ...]  # what buckets of one price have in common
_Sent: TypeAlias = dict[int, tuple[Traffic, ...]]  # by rank


@dataclass(frozen=True, slots=True)
class _Asked:
    """A way to cut gradients into buckets: `nbytes` of one at most; whether larger gradients are divided by rows, and
    whether buckets become smaller towards the end of the backward pass, as `partition` makes them where it is not told.
    """

    nbytes: int
    divides: bool = False
    tapers: bool = False


@dataclass(frozen=True, slots=True)
class _Cut:
    """The buckets of one size: where their gradients lie, |gradient|^2, and when they are ready."""

    layouts: tuple[Layout, ...]
    squares: tuple[float, ...]
    ready_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EncodeTimes:
    """The seconds of a candidate's turns, by elements that a rank encodes: `(numel, turns_s)`, ascending."""

    timed: tuple[tuple[int, tuple[float, ...]], ...]

    def of(self, numel: int, turns: int) -> tuple[float, ...]:
        """Return the seconds of each of `turns` turns for `numel` elements.

        Linear between what was timed, proportional beyond it, and no less than the least that was timed.
        """
        found = self._of(numel)
        if len(found) < turns:  # more messages than the timed buckets needed
            return (*found, *(0.0,) * (turns - len(found)))
        return (*found[: turns - 1], sum(found[turns - 1 :]))

    def _of(self, numel: int) -> tuple[float, ...]:
        most, most_s = self.timed[-1]
        if numel >= most:
            return tuple(one * numel / max(1, most) for one in most_s)
        for (low, low_s), (high, high_s) in pairwise(self.timed):
            if low <= numel < high:
                part = (numel - low) / (high - low)
                return tuple(a + part * (b - a) for a, b in zip(low_s, high_s, strict=True))
        return self.timed[0][1]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A candidate for a bucket, on any link: what the run makes of it, and its compression error."""

    exchange: Exchange
    loss: float


@dataclass(slots=True)
class ExchangeProfile:
    """The measurements of exchanges that do not depend on the links.

    Ranks measure at the same time, as they will compute at the same time, and the largest number over all ranks counts.
    More is measured on demand: candidates for buckets of another size, or between islands that were detected later.
    """

    params: Mapping[str, Tensor]
    pump: CommThread
    ready_s: Mapping[str, float]  # this rank's, by parameter
    times: tuple[float, float, float]  # compute, backward, stolen share
    squares: Mapping[str, float]  # |gradient|^2, this rank's; empty if gradients were not finite
    lost: Mapping[str, Mapping[str, float]]  # |x - kept|^2 by exchange and parameter, this rank's
    occupied: Mapping[str, float] = field(default_factory=dict)  # part of a gradient that is not zero on some rank
    idle: frozenset[str] = frozenset()  # parameters of whose gradient nothing is known: it was zero on all ranks
    as_sent: Callable[[Exchange], Exchange] = lambda one: one  # what the run makes of a candidate
    look_ahead: int | None = None  # of a run that keeps to no planned order of messages
    _cuts: dict[_Asked, _Cut] = field(default_factory=dict)
    _columns: dict[tuple[str, _Groups, _Asked], tuple[_Cell | None, ...]] = field(default_factory=dict)
    _times: dict[tuple[str, _Groups], EncodeTimes] = field(default_factory=dict)
    _sampled: list[Layout] = field(default_factory=list)
    _encoded: list[tuple[float, float]] = field(default_factory=list)  # seconds in which encoding ran, and all of them
    _traffic: dict[tuple[str, _Groups, _Alike], _Sent] = field(default_factory=dict)

    @staticmethod
    def by(
        rehearsal: StepProfile,
        params: Mapping[str, Tensor],
        candidates: Sequence[Candidate],
        pump: CommThread,
        *,
        knows: bool,
        as_sent: Callable[[Exchange], Exchange] = lambda one: one,
        look_ahead: int | None = None,
    ) -> ExchangeProfile:
        """Return the profile: the step's times, and the compression error of each candidate, measured once.

        `rehearsal`: a profiled step with its gradients. `knows`: whether these are finite on all ranks; if not, the
        errors of lossy candidates stay unknown. `as_sent`: what the run makes of a candidate on the ranks as they are,
        such as a reduce-scatter to the owners of sharded states. `look_ahead`: by which the run orders its messages,
        if it keeps to no planned order. All ranks must call it.
        """
        times = [rehearsal.compute_s, rehearsal.backward_s, encode_slowdown()]
        agreed = _largest(pump, ("compute_s", "backward_s", "stolen"), times)
        occupied, idle = occupied_by(pump, rehearsal) if knows else ({}, frozenset[str]())
        gradients = with_stand_ins(rehearsal.gradients, idle) if knows else {}
        squares = {n: float(g.double().square().sum()) for n, g in gradients.items()}
        lost = {told(c.loses_as): lost_of(c, gradients) for c in candidates} if knows else {}
        return ExchangeProfile(
            params,
            pump,
            rehearsal.ready_s,
            (agreed[0], agreed[1], agreed[2]),
            squares,
            lost,
            occupied,
            idle,
            as_sent,
            look_ahead,
        )

    @property
    def knows(self) -> bool:
        """Return whether the compression errors of lossy exchanges are known."""
        return bool(self.lost)

    @property
    def ran(self) -> float:
        """Return the fraction of the seconds of encoding, as they were timed, in which its thread ran."""
        ran_s, timed_s = (sum(some) for some in zip(*self._encoded, strict=True)) if self._encoded else (1.0, 1.0)
        return min(1.0, ran_s / timed_s) if timed_s else 1.0

    def facts(
        self,
        links: Network,
        candidates: Sequence[Candidate],
        largest: int,
        *,
        price: MessagePrice = _FREE,
        divides: bool = False,
    ) -> tuple[StepMeasurements, ...]:
        """Return the measurements of a step, with the time on these links, for each way to cut it into buckets.

        `largest`: the most bytes of a bucket. `price`: what messages take of a rank's processors. `divides`: whether a
        gradient as large as two buckets may also be divided by rows; what is known of it holds for each part. All ranks
        must call it together.
        """
        sizes = sizes_of_buckets(self.params, largest)
        asked = [_Asked(size, tapers=tapers) for tapers in (False, True) for size in sizes]
        if divides:
            asked += [_Asked(size, divides=True) for size in sizes if len(self._divided(size)) > len(self.params)]
        cuts = {self._cut(one).layouts: one for one in reversed(asked)}  # many are alike: the first of them
        return tuple(self._facts(links, candidates, one, price) for one in asked if cuts[self._cut(one).layouts] is one)

    def _facts(
        self, links: Network, candidates: Sequence[Candidate], asked: _Asked, price: MessagePrice
    ) -> StepMeasurements:
        cut = self._cut(asked)
        columns = [self._column(c, asked) for c in candidates]
        total = sum(cut.squares) or 1.0
        known = [dict[_Alike, Option]() for _ in candidates]  # layers repeat
        buckets = []
        for b, where in enumerate(cut.layouts):
            occupied = self._occupied_of(where)
            options = list[Option | None]()
            for candidate, column, prices in zip(candidates, columns, known, strict=True):
                if (cell := column[b]) is None:
                    options.append(None)
                    continue
                alike = _alike(cell.exchange, where, occupied)
                if alike not in prices:
                    by_rank = self._sent(candidate, cell.exchange, where, occupied)
                    messages, sent = priced(by_rank, self.pump.channel.levels, links, price)
                    turns_s = self.turn_seconds(candidate, cell.exchange, where, len(messages) + 1)
                    prices[alike] = Option(turns_s, messages, sent, cell.loss)
                options.append(replace(prices[alike], loss=cell.loss))
            names = tuple(e.name for e in where.entries)
            weight = cut.squares[b] / total
            buckets.append(BucketMeasurements(names, where.numel, cut.ready_s[b], weight, tuple(options)))
        return StepMeasurements(tuple(buckets), *self.times, self.ran, self.look_ahead)

    def _sent(self, candidate: Candidate, exchange: Exchange, where: Layout, occupied: float) -> _Sent:
        """Return the messages by rank for a bucket like `where`, which are the same on all links."""
        levels = self.pump.channel.levels
        key = told(candidate.written), tuple(sorted(levels.groups.items())), _alike(exchange, where, occupied)
        if key not in self._traffic:
            self._traffic[key] = _traffic(exchange, where, levels, occupied)
        return self._traffic[key]

    def _cut(self, asked: _Asked) -> _Cut:
        if asked not in self._cuts:
            params = self._divided(asked.nbytes) if asked.divides else self.params
            cut = partition(params, bucket_bytes=asked.nbytes, **({} if asked.tapers else {"at_least": 1}))
            layouts = _apart(cut, self.params)
            names = [f"{what} of bucket {b}" for what in ("|gradient|^2", "ready_s") for b in range(len(layouts))]
            mine = [sum(self._part(self.squares, e) for e in where.entries) for where in layouts]
            mine += [max(self.ready_s[self._whole(e.name)] for e in where.entries) for where in layouts]
            agreed = _largest(self.pump, names, mine)
            ready = sorted(range(len(layouts)), key=lambda b: agreed[len(layouts) + b])  # as all ranks found them
            self._cuts[asked] = _Cut(
                tuple(layouts[b] for b in ready),
                tuple(agreed[b] for b in ready),
                tuple(agreed[len(layouts) + b] for b in ready),
            )
        return self._cuts[asked]

    def _divided(self, nbytes: int) -> Mapping[str, Tensor]:
        """Return the parameters, those as large as two buckets of `nbytes` divided by rows."""
        return divided(self.params, bucket_bytes=nbytes)

    def _whole(self, name: str) -> str:
        """Return the parameter of which `name` is the name, or that of a part."""
        return name if name in self.params else whole_of(name)

    def _part(self, of: Mapping[str, float], entry: Entry) -> float:
        """Return what is known of a parameter, or of a part of it: as large a share of it; 0 where nothing is."""
        whole = self._whole(entry.name)
        return of.get(whole, 0.0) * entry.numel / max(1, self.params[whole].numel())

    def _column(self, candidate: Candidate, asked: _Asked) -> tuple[_Cell | None, ...]:
        """Return the candidate for every bucket; None if it cannot serve, or if its compression error is unknown."""
        levels, cut = self.pump.channel.levels, self._cut(asked)
        key = (told(candidate.written), tuple(sorted(levels.groups.items())), asked)
        if key not in self._columns:
            one = self.as_sent(ParameterRules.single(candidate.written))
            serving = [self.serves(candidate, where, one) for where in cut.layouts]
            if not any(serving):  # as all ranks find
                return self._columns.setdefault(key, (None,) * len(serving))
            loss = gathered(self.pump.channel, self._loss(candidate, cut)).max(0).values.tolist()
            times = self.encode_times(candidate, one)
            self._columns[key] = tuple(
                _Cell(one, part) if serves and math.isfinite(part) and times.timed else None
                for serves, part in zip(serving, loss, strict=True)
            )
        return self._columns[key]

    def encode_times(self, candidate: Candidate, exchange: Exchange) -> EncodeTimes:
        """Return the candidate's encode times, measured once for these groups. All ranks must call it together."""
        levels, rank = self.pump.channel.levels, self.pump.channel.rank
        key = (told(candidate.written), tuple(sorted(levels.groups.items())))
        if key not in self._times:
            layouts = [one for one in self._samples() if _serves(candidate, one, levels, exchange)]
            occupied = self._occupied_below(candidate.most_occupied)
            began_s, before_s = time.perf_counter(), time.thread_time()
            turns = [exchange_methods.turn_seconds_of(exchange, one, levels, rank, occupied) for one in layouts]
            mine = [time.thread_time() - before_s, time.perf_counter() - began_s]
            most = max(map(len, turns), default=0)  # a bucket of vectors alone may need fewer messages
            each = [(_encoded(exchange, one, levels), own) for one, own in zip(layouts, turns, strict=True)]
            timed = sorted(dict(one for one in each if len(one[1]) == most).items(), key=lambda one: one[0])
            names = [f"cpu_s of {candidate.said} for {numel} numbers" for numel, own in timed for _ in own]
            names = ["seconds in which encoding ran", "seconds of encoding", *names]
            ran_s, timed_s, *agreed = _largest(self.pump, names, mine + [s for _, own in timed for s in own])
            self._encoded.append((ran_s, timed_s))
            turns_s = iter(agreed)
            self._times[key] = EncodeTimes(tuple((numel, tuple(next(turns_s) for _ in own)) for numel, own in timed))
        return self._times[key]

    def turn_seconds(self, candidate: Candidate, exchange: Exchange, where: Layout, turns: int) -> tuple[float, ...]:
        """Return the seconds of each of `turns` turns of a candidate, built as `exchange`, for a bucket.

        All ranks must call it together for the first bucket.
        """
        return self.encode_times(candidate, exchange).of(_encoded(exchange, where, self.pump.channel.levels), turns)

    def serves(self, candidate: Candidate, where: Layout, exchange: Exchange) -> bool:
        """Return whether a candidate, built as `exchange`, can and should serve a bucket; the same on all ranks."""
        is_sparse_enough = self._occupied_of(where) <= candidate.most_occupied
        return is_sparse_enough and _serves(candidate, where, self.pump.channel.levels, exchange)

    def _occupied_of(self, where: Layout) -> float:
        """Return the part of a bucket that is not zero on some rank; 1 where nothing is known."""
        parts = (self.occupied.get(self._whole(e.name), 1.0) * e.numel for e in where.entries)
        return sum(parts) / max(1, where.numel)

    def _occupied_below(self, most: float) -> float:
        """Return the part in use of all the parameters of which that is at most `most`; 1 where that is any."""
        if most == 1.0:
            return 1.0
        parts = {n: part for n, part in self.occupied.items() if part <= most}
        numel = sum(self.params[n].numel() for n in parts)
        return sum(part * self.params[n].numel() for n, part in parts.items()) / numel if numel else 1.0

    def _samples(self) -> list[Layout]:
        """Return a bucket of this model near each size that is timed, ascending; of a small model fewer."""
        if self._sampled:
            return self._sampled
        found = dict[int, Layout]()
        for size in _TIMED_BYTES:
            cuts = [partition(some, bucket_bytes=size, at_least=1) for some in (self.params, self._divided(size))]
            near = [min(layouts, key=lambda one: abs(one.nbytes - size)) for layouts in cuts if layouts]
            fits = [one for one in near if size / 2 <= one.nbytes <= 2 * size]
            for one in (fits or near)[:1]:  # a part of a gradient only where no bucket of whole ones is near
                found.setdefault(one.numel, one)
        self._sampled = [found[numel] for numel in sorted(found)]
        return self._sampled

    def _loss(self, candidate: Candidate, cut: _Cut) -> list[float]:
        """Return |x - kept|^2 / |x|^2 of this rank's gradients by bucket; nan if unknown and the candidate is lossy."""
        if not self.knows:
            return [math.nan if candidate.lossy else 0.0] * len(cut.layouts)
        by_name, found = self.lost[told(candidate.loses_as)], []
        for where in cut.layouts:
            square = sum(self._part(self.squares, e) for e in where.entries)
            found.append(sum(self._part(by_name, e) for e in where.entries) / square if square else 0.0)
        return found

    def round_facts(
        self, loop: OuterLoopConfig, links: Network, levels: ProcessGroups, units: Sequence[str], bucket_bytes: int
    ) -> RoundMeasurements:
        """Return the measurements of an island's own step, and of a round of `loop` between the islands of `levels`.

        All ranks must call it: they measure the encoding at the same time, and the slowest counts.
        """
        inside, cut, rank = levels.only("island"), self._cut(_Asked(bucket_bytes)), self.pump.channel.rank
        near = links.model_copy(update={"levels": {"all": links.levels.get("island", links.levels["all"])}})
        buckets = tuple(
            BucketMeasurements((), w.numel, at, 0.0, ()) for w, at in zip(cut.layouts, cut.ready_s, strict=True)
        )
        alone = StepMeasurements(buckets, *self.times)
        on_wire = [_on_wire(Dense(), where, inside, near) for where in cut.layouts]
        dense = [Option((0.0,) * (len(messages) + 1), messages, sent, 0.0) for messages, sent in on_wire]
        fragments = exchanges_of_round(loop, self.params, levels, units=units, bucket_bytes=BUCKET_BYTES)
        squares = exchange_of_second_moments(levels)
        cpu_s = sum(exchange_methods.seconds_of(x, where, levels, rank) for one in fragments for where, x in one)
        return RoundMeasurements(
            step_s=cost_of_step(alone, play(tasks_of_step(alone, dense))).step_s,
            fragments_s=tuple(sum(_wire_seconds(x, where, levels, links) for where, x in one) for one in fragments),
            cpu_s=_largest(self.pump, ("cpu_s of a round",), [cpu_s])[0],
            stolen=self.times[2],
            second_moments_s=sum(_wire_seconds(squares, where, levels, links) for one in fragments for where, _ in one),
        )


def _largest(pump: CommThread, names: Sequence[str], mine: Sequence[float]) -> tuple[float, ...]:
    """Return the largest of each number over all ranks. Raises BadInput for non-finite ones, with name and rank."""
    rows = gathered(pump.channel, mine).tolist()
    for rank, row in zip(pump.channel.levels.everyone, rows, strict=True):
        for name, value in zip(names, row, strict=True):
            check_finite(name, value, where=f" on rank {rank}")
    return tuple(map(max, zip(*rows, strict=True)))


def _serves(candidate: Candidate, where: Layout, levels: ProcessGroups, exchange: Exchange) -> bool:
    """Return whether a candidate can and should serve a bucket among these ranks, whatever part of it is zero."""
    ranks = max(map(len, levels.groups["all"]))
    if where.dtype is torch.float64 and not (candidate.lossy or exchange.traits.lossless):
        return False  # bf16 is near enough to float32, and not to this
    if where.numel < candidate.least_numel or (candidate.hub and (ranks - 1) * where.nbytes > LARGEST_BUCKET_BYTES):
        return False
    try:
        exchange.check(where, levels)
    except BadInput:
        return False
    return True


def _alike(exchange: Exchange, where: Layout, occupied: float) -> _Alike:
    """Return what a bucket has in common with all that have its price."""
    named = tuple(e.name for e in where.entries) if exchange.divides_by_name else ()
    return tuple(e.shape for e in where.entries), named, where.dtype, occupied


def _encoded(exchange: Exchange, where: Layout, levels: ProcessGroups) -> int:
    """Return how many elements of a bucket the rank encodes that encodes most: an owner's part between islands."""
    return max(exchange.owner_numels(where, levels), default=0)


def _apart(layouts: Sequence[Layout], params: Mapping[str, Tensor]) -> tuple[Layout, ...]:
    """Return the layouts with a bucket of its own for each part of a parameter, as the run needs it."""
    found = list[Layout]()
    for where in layouts:
        whole = [e for e in where.entries if e.name in params]
        if len(whole) < len(where.entries) > 1:
            alone = [[e] for e in where.entries if e.name not in params]
            found += [_layout(some, where) for some in ([whole] if whole else []) + alone]
        else:
            found.append(where)
    return tuple(found)


def _layout(entries: Sequence[Entry], like: Layout) -> Layout:
    starts = accumulate((e.numel for e in entries), initial=0)
    return replace(like, entries=tuple(replace(e, start=at) for e, at in zip(entries, starts, strict=False)))


_Prices: TypeAlias = tuple[tuple[PricedMessage, ...], int]


def _on_wire(
    exchange: Exchange,
    where: Layout,
    levels: ProcessGroups,
    links: Network,
    occupied: float = 1.0,
    price: MessagePrice = _FREE,
) -> _Prices:
    """Return (prices of the messages, bytes of the rank that sends most)."""
    return priced(_traffic(exchange, where, levels, occupied), levels, links, price)


def _traffic(
    exchange: Exchange, where: Layout, levels: ProcessGroups, occupied: float = 1.0
) -> dict[int, tuple[Traffic, ...]]:
    """Return the messages of an exchange by rank; of many ranks, those of the first and the last ones.

    Between islands also those that own a part of the bucket, which may be one in the midst of an island: of the first
    and the last island, of the smallest, and of the largest, whose owners receive most inside it.
    """
    everyone = sorted(r for group in levels.groups["all"] for r in group)
    half = _SAMPLED_RANKS // 2
    asked = everyone if len(everyone) <= _SAMPLED_RANKS else [*everyone[:half], *everyone[-half:]]
    found = {r: exchange.expected_traffic(where, levels, r, occupied) for r in asked}
    if len(everyone) <= _SAMPLED_RANKS or not any(one.level == "between" for one in found[everyone[0]]):
        return found
    by_size = sorted(levels.groups["island"], key=len)
    owning = [place for place, numel in enumerate(exchange.owner_numels(where, levels)) if numel]
    each = -(-len(owning) // _SAMPLED_OWNERS)
    for island in dict.fromkeys((levels.groups["island"][0], levels.groups["island"][-1], by_size[0], by_size[-1])):
        for at, place in enumerate(owning):
            if at % each:
                found.setdefault(island[place], found[island[owning[at - at % each]]])
            elif island[place] not in found:
                found[island[place]] = exchange.expected_traffic(where, levels, island[place], occupied)
    return found


def _wire_seconds(exchange: Exchange, where: Layout, levels: ProcessGroups, links: Network) -> float:
    """Return the seconds of an exchange's messages, one after the other."""
    return wire_seconds(_traffic(exchange, where, levels), levels, links)[0]
