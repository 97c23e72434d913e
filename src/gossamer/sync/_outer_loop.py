"""Islands that train apart: where they parted, how far each has gone, and how they come together again.

An island takes steps of its own from a common point, the anchor. From time to time its displacement from there meets
those of the others; the anchor moves by what comes of it, on all islands alike, and the island goes on from there.
Fragments of the model do so one after the other, and training goes on while they are under way: displacements have
groups and a pump of their own, so that no step waits behind them.

One step of the driver, after the update of training step t:
    land     fragments whose exchange has had its time: the rule moves their anchor, the island takes it over
    leave    fragments whose turn it is: displacement = anchor - own; who takes part, and with what weight, is gathered
    launch   their exchange; with a delay of 0 they land at once
Where nobody is waited for any longer than so, a thread of every rank does the last two (`QuorumThread`): of an island
that is late it sends nothing, with no weight, and what comes of the round lands there as everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, as_float, partition
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import (
    Collective,
    ExchangeContext,
    ExchangeState,
    Outcome,
    ProcessGroups,
    Traffic,
    late,
    sent_at,
)
from gossamer.exchange import Exchange, has_residual
from gossamer.exchange.codec.fp8 import Fp8
from gossamer.exchange.dense import Dense
from gossamer.exchange.two_shot import TwoShot
from gossamer.sync._fragments import (
    Fragment,
    FragmentBucket,
    FragmentProgress,
    PendingSync,
    SecondMomentSync,
    SyncLaunch,
    are_finite,
    fragments_of,
)
from gossamer.sync._gradient_reducer import GradientReducer
from gossamer.sync._group_error import among_all, stays_of
from gossamer.sync._outer_config import OuterLoopConfig
from gossamer.sync._quorum import QuorumThread, RoundDeadline, RoundQuorum
from gossamer.sync.outer import OuterStep

T = TypeVar("T")
SecondMoments: TypeAlias = Callable[[Collection[str]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What the driver is told of a step that has ended: how many there are now, its rate, what this rank saw in it, and
    whether its island made it at all.
    """

    done: int
    rate: float
    samples: float
    seed: int
    last: bool = False  # no step comes after it: everything meets now
    made: bool = True


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What has come of a round: what the parameters of a fragment have moved by in the mean, and the sum of the rates
    of its steps, 0 where nobody has moved. The same on all ranks; what is not finite counts for nothing.
    """

    moved: Mapping[str, Tensor]
    rates: float
    squares: Mapping[str, Tensor] = field(default_factory=dict)  # second moments that were sent a round ago, their mean


@dataclass(frozen=True, slots=True)
class LocalContribution:
    """What an island brings to a round: its displacements, fragment by fragment, and which of them are finite."""

    flats: Sequence[list[Tensor]]
    sound: Sequence[bool]


@dataclass(slots=True)
class OuterLoop:
    """One rank's end of the outer loop. Where there is no loop it holds nothing, and every call does nothing.

    `params`: what is trained, by name; `truth`: the same names, with the float32 copies that the update rule moves in
    place of parameters in half types. `pump` runs over the levels of `ProcessGroups.twice`, for nothing else.
    """

    loop: OuterLoopConfig | None
    params: Mapping[str, Tensor]
    truth: Mapping[str, Tensor]
    replica: GradientReducer
    pump: CommThread | None
    exchange: Exchange | None  # of displacements, among all ranks
    each: Exchange | None
    fragments: list[Fragment] = field(default_factory=list)
    second_moments: SecondMoments = lambda names: {}  # this island's by now, of these parameters
    exposed_s: float = 0.0  # waited for, since it was last set to 0
    roll: QuorumThread[LocalContribution, list[SyncLaunch]] | None = None  # where a round does not wait for all
    _ends: tuple[int, int] = (0, 0)  # the last step of the run, and its seed

    @staticmethod
    def of(
        loop: OuterLoopConfig | None,
        params: Mapping[str, Tensor],
        truth: Mapping[str, Tensor],
        replica: GradientReducer,
        pump: CommThread | None,
        *,
        units: Sequence[str] = (),
        bucket_bytes: int,
        second_moments: SecondMoments = lambda names: {},
        asked: Callable[[], bool] = lambda: False,
    ) -> OuterLoop:
        """All islands must hold the same parameters now. `asked`: whether this rank is to stop, where that is told with
        the rounds. Raises BadInput where an exchange cannot serve.
        """
        if loop is None:
            return OuterLoop(None, params, truth, replica, None, None, None)
        levels = replica.levels
        exchange = among_all(loop.exchange, levels, keeps=loop.keeps)
        each = among_all(loop.each, levels, keeps=True) if loop.each is not None else None
        found = OuterLoop(loop, params, truth, replica, pump, exchange, each, second_moments=second_moments)
        for names in fragments_of(truth, loop.fragments, units):
            layouts = partition({n: truth[n] for n in names}, bucket_bytes=bucket_bytes)
            parts = [_part(as_float(layout), exchange, each, levels) for layout in layouts]
            found.fragments.append(Fragment(parts, loop.rule.init([part.anchor for part in parts])))
        found.anchor_here()
        if loop.patience_s and len(levels.groups["island"]) > 1:
            assert pump is not None
            found.roll = QuorumThread(pump.channel, loop.patience_s, asked)
        return found

    def begin(self, done: int, steps: int, seed: int) -> None:
        """The run goes on after `done` of its `steps`; what was restored is in place."""
        self._ends = steps, seed
        if self.loop is not None and self.loop.apart(done):
            self._call_from(done)

    def _call_from(self, done: int) -> None:
        """The islands are apart from now on."""
        if self.roll is None:
            return
        steps, _ = self._ends
        courses = [FragmentProgress(f.rounds, [part.state for part in f.parts], f.flight) for f in self.fragments]
        dues = (
            RoundDeadline(at, 4 * len(self._leaving(at, last=at == steps)), at == steps)
            for at in range(done + 1, steps + 1)
        )
        self.roll.begin((due for due in dues if due.width), lambda call, gone: self._depart(courses, call, gone))

    def close(self) -> None:
        """Let go of what runs beside the steps."""
        if self.roll is not None:
            self.roll.close()

    def is_late(self, done: int) -> bool:
        """Whether a round that ends after more than `done` steps has gone on without this island, which then makes none
        of those that are left of it. Its ranks ask for it together.
        """
        if self.roll is None or not self._loop.apart(done):
            return False
        missed = float(self.roll.missed)
        if len(self.replica.levels.group("island", self.replica.rank)) > 1:
            missed = float(self.replica.gather((missed,), "island").max())
        return missed > done

    @torch.no_grad()
    def anchor_here(self) -> None:
        """The anchor is where this rank is: all islands are there."""
        for part in self._parts():
            for name, view in part.views(part.anchor):
                view.copy_(self.truth[name])
            if part.was.numel():
                part.was.copy_(part.anchor)

    @property
    def factor(self) -> float:
        """What the learning rate of this island's steps is multiplied with."""
        if self.loop is None:
            return 1.0
        found = [self.loop.rule.inner_factor(fragment.outer) for fragment in self.fragments]
        return sum(found) / len(found)

    @torch.no_grad()
    def after(self, moved: LocalStep) -> list[SyncResult]:
        """A training step of this island has ended, with an update or without: then at rate 0, of no samples. The
        rounds that have ended with it.
        """
        loop = self.loop
        if loop is None:
            return []
        if not loop.apart(moved.done - 1):
            if loop.apart(moved.done) or moved.last:
                self.anchor_here()
            if loop.apart(moved.done) and not moved.last:
                self._call_from(moved.done)
            return []
        for fragment in self.fragments:
            fragment.steps, fragment.made = fragment.steps + 1, fragment.made + moved.made
            fragment.rates, fragment.samples = fragment.rates + moved.rate, fragment.samples + moved.samples
        if self.each is not None:
            self._meet_at_once(moved)
        landing = [f for f in self.fragments if f.flight and (moved.last or moved.done - f.flight.since >= loop.delay)]
        leaving = self._leaving(moved.done, last=moved.last)
        landed: list[SyncResult] = []
        if not loop.returns:
            landed += self._land(landing, final=False)  # in the last step they leave once more
        gone = [self._displacement(f) for f in leaving]
        if loop.returns:  # what lands now was sent a round ago, and the island starts again from where it leads
            landed += self._land(landing, final=moved.last)
            self._return(leaving)
        landed += self._learn(leaving)
        landed += self._launch(leaving, gone, moved)
        if moved.last or not loop.delay:
            landed += self._land([f for f in leaving if f.flight], final=moved.last)
        return landed

    def _leaving(self, done: int, *, last: bool = False) -> list[Fragment]:
        """The fragments whose turn it is after `done` steps."""
        return [f for i, f in enumerate(self.fragments) if last or self._loop.sends(i, done)]

    def _displacement(self, fragment: Fragment) -> list[Tensor]:
        gone = []
        for part in fragment.parts:
            flat = part.anchor.clone()
            for name, view in part.views(flat):
                view.sub_(self.truth[name])
            gone.append(flat)
        return gone

    def _launch(self, leaving: Sequence[Fragment], gone: Sequence[list[Tensor]], moved: LocalStep) -> list[SyncResult]:
        """Who takes part is gathered first: an island whose displacement is not finite is left out, and all know. What
        has ended with that is where nobody's is.
        """
        if not leaving:
            return []
        row: list[float] = []
        brought = LocalContribution(gone, [are_finite(flats) for flats in gone])
        for fragment, ok in zip(leaving, brought.sound, strict=True):
            row += [fragment.samples if ok else 0.0, float(ok), fragment.rates, float(fragment.made)]
        is_there, here = True, [self._left(fragment, flats) for fragment, flats in zip(leaving, gone, strict=True)]
        if (roll := self.roll) is not None:
            call, departed = self._waiting(lambda: roll.answer(moved.done, tuple(row), brought))
            is_there = call.present[self.replica.rank]
        else:
            rows = self._waiting(lambda: self.replica.gather(tuple(row)))  # (ranks, 4 per fragment)
            courses = [FragmentProgress(f.rounds, [part.state for part in f.parts], None) for f in leaving]
            departed = self._depart_all(leaving, courses, rows, brought, moved.done, moved.seed, last=moved.last)
        ended = []
        for fragment, left, one in zip(leaving, here, departed, strict=True):
            fragment.steps, fragment.made, fragment.rates, fragment.samples = 0, 0, 0.0, 0.0
            if one.flight is None or not is_there:
                self._return([fragment])
            if one.flight is None:
                ended.append(
                    SyncResult(fragment.views([torch.zeros_like(part.anchor) for part in fragment.parts]), 0.0)
                )
                continue
            fragment.rounds, fragment.flight, fragment.squares = fragment.rounds + 1, one.flight, one.squares
            if not is_there:  # it has not moved from where all were, and goes on from there
                one.flight.takes_part, left = True, self._left(fragment, ())
            one.flight.left = left if one.flight.takes_part else ()
        return ended

    def _left(self, fragment: Fragment, gone: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Where the island is that has `gone` so far; nothing where nobody will ask."""
        if not self._loop.carries:
            return ()
        if not gone:
            return tuple(part.anchor.clone() for part in fragment.parts)
        return tuple(part.anchor - flat for part, flat in zip(fragment.parts, gone, strict=True))

    def _depart(
        self, courses: Sequence[FragmentProgress], call: RoundQuorum, gone: LocalContribution | None
    ) -> list[SyncLaunch]:
        """On the thread that sees to who takes part: send what this rank brings; nothing of one that is late."""
        steps, seed = self._ends
        leaving = self._leaving(call.step, last=call.step == steps)
        mine = [courses[self.fragments.index(fragment)] for fragment in leaving]
        if gone is None:
            zeros = [[torch.zeros_like(part.anchor) for part in fragment.parts] for fragment in leaving]
            gone = LocalContribution(zeros, [False] * len(leaving))
        found = self._depart_all(leaving, mine, call.rows, gone, call.step, seed, last=call.step == steps)
        for course, departed in zip(mine, found, strict=True):
            course.next(departed)
        return found

    def _depart_all(
        self,
        leaving: Sequence[Fragment],
        courses: Sequence[FragmentProgress],
        rows: Tensor,
        gone: LocalContribution,
        done: int,
        seed: int,
        *,
        last: bool,
    ) -> list[SyncLaunch]:
        """Send what takes part, with the weights of those who do: `rows`, (ranks, 4 per fragment)."""
        found = []
        for index, (fragment, course) in enumerate(zip(leaving, courses, strict=True)):
            samples, takes_part, *gone_by = rows[:, 4 * index : 4 * index + 4].unbind(1)
            weights, flats, sound = _weights(samples, takes_part), gone.flats[index], gone.sound[index]
            if weights is None:  # nobody has anything to say
                found.append(SyncLaunch(None))
                continue
            rates, steps = (float((weights * of).sum()) for of in gone_by)
            at = OuterStep(course.rounds, steps, rates, (seed, done, self.fragments.index(fragment)))
            if not sound:
                for flat in flats:
                    flat.zero_()
            flight = PendingSync(done, at, sound, None)
            here = ExchangeContext(*self._here, weights, at.key[:2], 1.0, self._loop.keeps)
            self._exchange(fragment, flight, flats, course.now(), here, final=last)
            tells = self._loop.tells(at.number) and not last
            found.append(SyncLaunch(flight, self._tell(fragment, here, sound=sound) if tells else None))
        return found

    def _tell(self, fragment: Fragment, at: ExchangeContext, *, sound: bool) -> SecondMomentSync | None:
        """Send second moments, where the rule has any."""
        squares = self.second_moments([e.name for part in fragment.parts for e in part.layout.entries])
        if len(at.levels.groups["island"]) == 1 or not squares:
            return None
        flats = [torch.zeros_like(part.anchor) for part in fragment.parts]
        if sound:
            for part, flat in zip(fragment.parts, flats, strict=True):
                for name, view in part.views(flat):
                    view.copy_(squares[name])
        exchange = exchange_of_second_moments(at.levels)
        states = [exchange.init(part.layout) for part in fragment.parts]
        return SecondMomentSync(self._begin(exchange, fragment.parts, flats, states, replace(at, accounts=False)))

    def _learn(self, leaving: Sequence[Fragment]) -> list[SyncResult]:
        """The second moments that were sent with the round before."""
        found = []
        for fragment in leaving:
            squares, fragment.squares = fragment.squares, None
            means = self._waiting(squares.wait) if squares is not None else ()
            if means and are_finite(means):  # the same bits on all ranks
                found.append(SyncResult({}, 0.0, fragment.views(means)))
        return found

    def _exchange(
        self,
        fragment: Fragment,
        flight: PendingSync,
        flats: Sequence[Tensor],
        states: Sequence[ExchangeState],
        at: ExchangeContext,
        *,
        final: bool,
    ) -> None:
        if len(at.levels.groups["island"]) == 1:  # one island has nobody to meet
            flight.outcomes = tuple(Outcome(flat, None, state) for flat, state in zip(flats, states, strict=True))
            return
        assert self.exchange is not None
        exchange = self.exchange
        if self._meets_in_full(flight, final):  # what the islands kept so far would be lost: the model is their mean
            exchange = among_all(Dense(), at.levels, keeps=False)
            states = [exchange.init(part.layout) for part in fragment.parts]
        flight.under_way = self._begin(exchange, fragment.parts, flats, states, at)

    def _begin(
        self,
        exchange: Exchange,
        parts: Sequence[FragmentBucket],
        flats: Sequence[Tensor],
        states: Sequence[ExchangeState],
        at: ExchangeContext,
    ) -> CommStep:
        assert self.pump is not None
        step = self.pump.begin([len(exchange.traffic(part.layout, at.levels, at.rank)) for part in parts])
        for index, (part, flat, state) in enumerate(zip(parts, flats, states, strict=True)):
            step.submit(index, sent_at(exchange.run(Bucket(part.layout, flat), state, at), late))
        return step

    def _land(self, landing: Sequence[Fragment], *, final: bool) -> list[SyncResult]:
        """Move the anchors by what has come; in the end nothing of an island's own is left."""
        landed = []
        for fragment in landing:
            flight, fragment.flight = fragment.flight, None
            assert flight is not None
            outcomes = self._waiting(flight.wait)
            full = self._meets_in_full(flight, final)
            means = [o.mean.float() for o in outcomes]
            arrived = are_finite(means)  # the same bits on all ranks
            if arrived:
                for part, outcome in zip(fragment.parts, outcomes, strict=True):
                    part.state = self._anew(part) if full else outcome.state
                self._loop.rule.step(fragment.anchors, means, fragment.outer, flight.at)
            keeps_own = arrived and flight.takes_part and not (final or full)
            losses = [stays_of(o, self._islands) if keeps_own else None for o in outcomes]
            carried = self._moved_since(fragment, flight) if keeps_own and flight.left else ()
            self._take_over(fragment, losses, self._loop.mix if keeps_own else 0.0, carried)
            came = means if arrived else [torch.zeros_like(mean) for mean in means]
            landed.append(SyncResult(fragment.views(came), flight.at.rates))
            flight.let_go([part.state for part in fragment.parts])
        return landed

    def _moved_since(self, fragment: Fragment, flight: PendingSync) -> Sequence[Tensor]:
        """How far the island has gone since its displacement was sent."""
        moved = []
        for part, left in zip(fragment.parts, flight.left, strict=True):
            flat = left.neg()
            for name, view in part.views(flat):
                view.add_(self.truth[name])
            moved.append(flat)
        return moved

    def _meets_in_full(self, flight: PendingSync, final: bool) -> bool:
        return self._loop.keeps and (final or self._loop.meets_in_full(flight.at.number))

    def _anew(self, part: FragmentBucket) -> ExchangeState:
        """What the exchange remembers when all has met: it was of displacements that are no more."""
        assert self.exchange is not None
        return part.state if has_residual(self.exchange) else self.exchange.init(part.layout)

    def _take_over(
        self, fragment: Fragment, losses: Sequence[Tensor | None], mix: float, carried: Sequence[Tensor] = ()
    ) -> None:
        """Go to the anchor, and on from there by what is `carried`; what was `lost` on the way stays with the island,
        and of its own parameters a part.
        """
        for index, (part, lost) in enumerate(zip(fragment.parts, losses, strict=True)):
            there = part.anchor if lost is None or not self._loop.keeps else part.anchor - lost
            there = there + carried[index] if carried else there
            for name, view in part.views(there):
                self._set(name, view if not mix else torch.lerp(view, self.truth[name], mix))
            if part.was.numel():
                part.was.copy_(there)

    def _return(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            self._take_over(fragment, [None] * len(fragment.parts), 0.0)

    def _set(self, name: str, value: Tensor) -> None:
        self.truth[name].copy_(value)
        if self.params[name].data_ptr() != self.truth[name].data_ptr():
            self.params[name].copy_(value)

    def _meet_at_once(self, moved: LocalStep) -> None:
        """What the step moved meets through `each`; of what that loses, every island keeps its own in its parameters.

        x_i <- was_i - lost_i - mean and anchor <- anchor - mean: the difference is what each has for itself.
        """
        assert self.each is not None
        parts = list(self._parts())
        steps = []
        for part in parts:
            flat = part.was.clone()
            for name, view in part.views(flat):
                view.sub_(self.truth[name])
            steps.append(flat)
        sound = are_finite(steps)
        row = (moved.samples if sound else 0.0, float(sound))
        weights = _weights(*self._waiting(lambda: self.replica.gather(row)).unbind(1))
        if not sound:  # this step is undone; the others' is taken over
            for flat in steps:
                flat.zero_()
        if weights is None:
            self._follow(parts)
            return
        at = ExchangeContext(*self._here, weights, (moved.seed, moved.done), 1.0, True)
        if len(at.levels.groups["island"]) == 1:
            outcomes = [Outcome(flat, None, part.each) for flat, part in zip(steps, parts, strict=True)]
        else:
            step = self._begin(self.each, parts, steps, [part.each for part in parts], at)
            outcomes = self._waiting(lambda: [step.result(i) for i in range(len(parts))])
        for part, outcome in zip(parts, outcomes, strict=True):
            part.each = outcome.state
            part.anchor.sub_(outcome.mean)
            part.was.sub_(outcome.mean)
            stays = stays_of(outcome, self._islands)
            if stays is not None and sound:
                part.was.sub_(stays)
        self._follow(parts)

    def _follow(self, parts: Sequence[FragmentBucket]) -> None:
        """The parameters become what `was` has become."""
        for part in parts:
            for name, view in part.views(part.was):
                self._set(name, view)

    @contextmanager
    def agreed(self, done: int) -> Iterator[None]:
        """With the parameters as all islands know them, the anchor, in place of this one's own."""
        if self.loop is None or not self.loop.apart(done - 1):
            yield
            return
        with torch.no_grad():
            own = {name: self.params[name].clone() for name in self.params}
            for part in self._parts():
                for name, view in part.views(part.anchor):
                    self.params[name].copy_(view)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in own.items():
                    self.params[name].copy_(tensor)

    def settle(self, done: int) -> None:
        """Before a checkpoint after `done` steps: what is under way is waited for, and lands when its time has come."""
        if self.loop is not None and not self.loop.apart(done - 1):
            self.anchor_here()
        for fragment in self.fragments:
            for under_way in (fragment.flight, fragment.squares):
                if under_way is not None:
                    self._waiting(under_way.wait)

    def part(self) -> None:
        """Start from the anchor, which is in place."""
        self._return(self.fragments)

    def common(self) -> dict[str, Tensor]:
        """The anchor by parameter, in place: what the islands agree on."""
        return {name: view for part in self._parts() for name, view in part.views(part.anchor)}

    def shared(self) -> dict[str, Tensor]:
        """What else is the same on all ranks, after `settle`: what the rule keeps, counters, and what is to land."""
        found: dict[str, Tensor] = {}
        for index, fragment in enumerate(self.fragments):
            found.update(fragment.shared(index, self._loop.rule.numbers))
        return found

    def own(self) -> dict[str, Tensor]:
        """What is this rank's alone, after `settle`: its parameters, and the state of its exchanges."""
        found = {f"at/{name}": self.truth[name] for name in self.common()}
        for index, fragment in enumerate(self.fragments):
            found.update(fragment.own(index))
        return found

    def restore(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Take back what `shared` and `own` gave, and what `common` did, which is in place already. Of `own`, what
        another number of ranks cannot take back may be missing: then this rank starts from the anchor.
        """
        for index, fragment in enumerate(self.fragments):
            fragment.restore(index, self._loop.rule.numbers, shared, own)
        for part in self._parts():
            for name, view in part.views(part.anchor):
                self._set(name, own.get(f"at/{name}", view))
            if part.was.numel():
                for name, view in part.views(part.was):
                    view.copy_(self.truth[name])

    def _parts(self) -> Iterator[FragmentBucket]:
        for fragment in self.fragments:
            yield from fragment.parts

    @property
    def _loop(self) -> OuterLoopConfig:
        assert self.loop is not None
        return self.loop

    @property
    def _islands(self) -> int:
        """How many there are."""
        return len(self.replica.levels.groups["island"])

    @property
    def _here(self) -> tuple[int, ProcessGroups]:
        return self.replica.rank, self.replica.levels

    def _waiting(self, what: Callable[[], T]) -> T:
        began = time.perf_counter()
        found = what()
        self.exposed_s += time.perf_counter() - began
        return found


def traffic_of_round(
    loop: OuterLoopConfig,
    params: Mapping[str, Tensor],
    levels: ProcessGroups,
    rank: int,
    *,
    units: Sequence[str] = (),
    bucket_bytes: int,
) -> tuple[Traffic, ...]:
    """What `rank` sends in `loop.cycle` steps beside gradients, weights, votes and words."""
    alone = len(levels.groups["island"]) == 1  # one island has nobody to meet
    found = [Traffic(Collective.GATHER, 2, 8)] * (loop.cycle if loop.each is not None else 0)
    full, of_squares = among_all(Dense(), levels, keeps=False), exchange_of_second_moments(levels)
    for fragment in exchanges_of_round(loop, params, levels, units=units, bucket_bytes=bucket_bytes):
        found += [Traffic(Collective.GATHER, 4, 8)] * loop.rounds
        for layout, exchange in fragment:
            if alone:
                continue
            rounds = [full if loop.meets_in_full(number) else exchange for number in range(loop.rounds)]
            rounds += [of_squares] * (loop.rounds // loop.second_moments if loop.second_moments else 0)
            for one in rounds:
                found += one.traffic(layout, levels, rank)
            if loop.each is not None:
                found += among_all(loop.each, levels, keeps=True).traffic(layout, levels, rank) * loop.cycle
    return tuple(found)


def exchange_of_second_moments(levels: ProcessGroups) -> Exchange:
    """Among all ranks. In a block they differ by as much as squares do: so five bits of exponent."""
    return among_all(TwoShot(Fp8("e5m2")), levels, keeps=False)


def exchanges_of_round(
    loop: OuterLoopConfig,
    params: Mapping[str, Tensor],
    levels: ProcessGroups,
    *,
    units: Sequence[str] = (),
    bucket_bytes: int,
) -> list[list[tuple[Layout, Exchange]]]:
    """What displacements of every fragment go through, bucket by bucket."""
    exchange = among_all(loop.exchange, levels, keeps=loop.keeps)
    return [
        [(as_float(layout), exchange) for layout in partition({n: params[n] for n in names}, bucket_bytes=bucket_bytes)]
        for names in fragments_of(params, loop.fragments, units)
    ]


def _part(layout: Layout, exchange: Exchange, each: Exchange | None, levels: ProcessGroups) -> FragmentBucket:
    exchange.check(layout, levels)
    if each is not None:
        each.check(layout, levels)
    room = torch.zeros(layout.numel, device=layout.device)
    was, state = (
        (torch.zeros_like(room), each.init(layout)) if each is not None else (room.new_empty(0), ExchangeState())
    )
    return FragmentBucket(layout, room, exchange.init(layout), was, state)


def _weights(samples: Tensor, takes_part: Tensor) -> Tensor | None:
    """The shares of the ranks, by samples seen; None where nobody takes part."""
    if not bool(takes_part.any()):
        return None
    counted = samples if float(samples.sum()) > 0 else takes_part
    return counted / counted.sum()
