"""The outer loop of local-update training: local steps, pseudo-gradients, outer optimizer.

Each replica group (one island) takes inner steps from the global parameters, here called the anchor. From time to time
all groups average their pseudo-gradients (anchor minus local parameters). The outer optimizer updates the anchor, the
same on all groups, and each group continues from there. The fragments of the model take turns, and training continues
while an exchange is in flight: pseudo-gradients have process groups and a communication thread of their own, so no
inner step waits behind them.

After the update of training step t the driver:
    land     applies the fragments whose exchange is `sync_delay` steps old: outer step, then load the anchor
    leave    takes the pseudo-gradients of the fragments that are due, and gathers who takes part with what weight
    launch   starts their exchange; with a delay of 0 applies it at once
With `straggler_timeout_s` a thread of every rank gathers and launches (`QuorumThread`). A rank of a late island then
sends zeros, at weight 0, and applies the result of the round like all others.
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
    """The end of one training step, as the driver reports it to the outer loop.

    `done`: steps made so far; `rate`: learning rate of the step; `samples`: samples this rank has seen in it; `made`:
    whether this island made the step.
    """

    done: int
    rate: float
    samples: float
    seed: int
    last: bool = False  # the last step of the run: all fragments are synchronized now
    made: bool = True


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result of one sync round of a fragment, equal on all ranks.

    `moved`: mean pseudo-gradient (anchor minus local) by parameter, zeros where it is not finite or no rank took part;
    `rates`: sum of the learning rates of the round's steps, 0 where no rank took part.
    """

    moved: Mapping[str, Tensor]
    rates: float
    squares: Mapping[str, Tensor] = field(default_factory=dict)  # mean of the second moments sent a round ago


@dataclass(frozen=True, slots=True)
class LocalContribution:
    """The contribution of a rank to a round: pseudo-gradients by fragment, and whether each is finite."""

    flats: Sequence[list[Tensor]]
    sound: Sequence[bool]


@dataclass(slots=True)
class OuterLoop:
    """The outer loop on one rank: global parameters, outer optimizer and pending rounds.

    Without a `loop` all calls do nothing. `params`: the trained parameters by name; `truth`: by the same names the
    float32 master weights, which the optimizer updates in place of parameters in half types. `pump`: a communication
    thread over the groups of `ProcessGroups.twice`, used for nothing else.
    """

    loop: OuterLoopConfig | None
    params: Mapping[str, Tensor]
    truth: Mapping[str, Tensor]
    replica: GradientReducer
    pump: CommThread | None
    exchange: Exchange | None  # of pseudo-gradients, among all ranks
    each: Exchange | None
    fragments: list[Fragment] = field(default_factory=list)
    second_moments: SecondMoments = lambda names: {}  # this island's current ones, of these parameters
    exposed_s: float = 0.0  # seconds waited since it was last set to 0
    roll: QuorumThread[LocalContribution, list[SyncLaunch]] | None = None  # with `straggler_timeout_s` only
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
        """Build the outer loop of one rank. All islands must hold the same parameters now.

        `asked`: returns whether this rank was asked to stop, which the rounds report where they do not wait for
        stragglers. Raise BadInput where an exchange cannot serve a bucket or these process groups.
        """
        if loop is None:
            return OuterLoop(None, params, truth, replica, None, None, None)
        levels = replica.levels
        exchange = among_all(loop.exchange, levels, keeps=loop.error_reset)
        each = among_all(loop.step_exchange, levels, keeps=True) if loop.step_exchange is not None else None
        found = OuterLoop(loop, params, truth, replica, pump, exchange, each, second_moments=second_moments)
        for names in fragments_of(truth, loop.fragments, units):
            layouts = partition({n: truth[n] for n in names}, bucket_bytes=bucket_bytes)
            parts = [_part(as_float(layout), exchange, each, levels) for layout in layouts]
            found.fragments.append(Fragment(parts, loop.outer_optimizer.init([part.anchor for part in parts])))
        found.anchor_here()
        if loop.straggler_timeout_s and len(levels.groups["island"]) > 1:
            assert pump is not None
            found.roll = QuorumThread(pump.channel, loop.straggler_timeout_s, asked)
        return found

    def begin(self, done: int, steps: int, seed: int) -> None:
        """Start after `done` of the run's `steps`, once the state is restored."""
        self._ends = steps, seed
        if self.loop is not None and self.loop.apart(done):
            self._call_from(done)

    def _call_from(self, done: int) -> None:
        """Start the quorum thread for the rounds after `done` steps."""
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
        """End the quorum thread, if there is one."""
        if self.roll is not None:
            self.roll.close()

    def is_late(self, done: int) -> bool:
        """Return whether a round that ends after more than `done` steps has continued without this island.

        The island then skips the remaining inner steps of that round. All ranks of an island must call this together.
        """
        if self.roll is None or not self._loop.apart(done):
            return False
        missed = float(self.roll.missed)
        if len(self.replica.levels.group("island", self.replica.rank)) > 1:
            missed = float(self.replica.gather((missed,), "island").max())
        return missed > done

    @torch.no_grad()
    def anchor_here(self) -> None:
        """Set the anchor (global parameters) to this rank's parameters, which must be equal on all islands."""
        for part in self._parts():
            for name, view in part.views(part.anchor):
                view.copy_(self.truth[name])
            if part.was.numel():
                part.was.copy_(part.anchor)

    @property
    def factor(self) -> float:
        """Return the factor on the learning rate of the inner steps: the outer optimizer's, averaged over fragments."""
        if self.loop is None:
            return 1.0
        found = [self.loop.outer_optimizer.inner_factor(fragment.outer) for fragment in self.fragments]
        return sum(found) / len(found)

    @torch.no_grad()
    def after(self, moved: LocalStep) -> list[SyncResult]:
        """Advance the outer loop by one training step and return the results of the rounds that ended with it.

        `moved`: the step; one without an update has rate 0 and 0 samples.
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
        landing = [
            f for f in self.fragments if f.flight and (moved.last or moved.done - f.flight.since >= loop.sync_delay)
        ]
        leaving = self._leaving(moved.done, last=moved.last)
        landed: list[SyncResult] = []
        if not loop.reset_to_global:
            landed += self._land(landing, final=False)  # in the last step they are sent once more
        gone = [self._displacement(f) for f in leaving]
        if (
            loop.reset_to_global
        ):  # the result that is applied now was sent a round ago; the island restarts from the new anchor
            landed += self._land(landing, final=moved.last)
            self._return(leaving)
        landed += self._learn(leaving)
        landed += self._launch(leaving, gone, moved)
        if moved.last or not loop.sync_delay:
            landed += self._land([f for f in leaving if f.flight], final=moved.last)
        return landed

    def _leaving(self, done: int, *, last: bool = False) -> list[Fragment]:
        """Return the fragments that are due to be sent after `done` steps."""
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
        """Gather who takes part, without islands whose pseudo-gradient is not finite, and start the exchange.

        Return the results of rounds in which no rank takes part, which end at once.
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
            if not is_there:  # it contributed zeros, as if it had not moved, and continues from the anchor
                one.flight.takes_part, left = True, self._left(fragment, ())
            one.flight.left = left if one.flight.takes_part else ()
        return ended

    def _left(self, fragment: Fragment, gone: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return this rank's parameters when the pseudo-gradient `gone` is sent; empty unless `carries`."""
        if not self._loop.keep_local_progress:
            return ()
        if not gone:
            return tuple(part.anchor.clone() for part in fragment.parts)
        return tuple(part.anchor - flat for part, flat in zip(fragment.parts, gone, strict=True))

    def _depart(
        self, courses: Sequence[FragmentProgress], call: RoundQuorum, gone: LocalContribution | None
    ) -> list[SyncLaunch]:
        """Send this rank's contribution, on the quorum thread; zeros of a rank that is late."""
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
        """Start the exchanges with the weights of the ranks that take part: `rows`, (ranks, 4 per fragment)."""
        found = []
        for index, (fragment, course) in enumerate(zip(leaving, courses, strict=True)):
            samples, takes_part, *gone_by = rows[:, 4 * index : 4 * index + 4].unbind(1)
            weights, flats, sound = _weights(samples, takes_part), gone.flats[index], gone.sound[index]
            if weights is None:  # no rank takes part
                found.append(SyncLaunch(None))
                continue
            rates, steps = (float((weights * of).sum()) for of in gone_by)
            at = OuterStep(course.rounds, steps, rates, (seed, done, self.fragments.index(fragment)))
            if not sound:
                for flat in flats:
                    flat.zero_()
            flight = PendingSync(done, at, sound, None)
            here = ExchangeContext(*self._here, weights, at.key[:2], 1.0, self._loop.error_reset)
            self._exchange(fragment, flight, flats, course.now(), here, final=last)
            tells = self._loop.tells(at.number) and not last
            found.append(SyncLaunch(flight, self._tell(fragment, here, sound=sound) if tells else None))
        return found

    def _tell(self, fragment: Fragment, at: ExchangeContext, *, sound: bool) -> SecondMomentSync | None:
        """Start to average second moments, where the optimizer has any."""
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
        """Return the second moments that were sent with the round before."""
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
        if len(at.levels.groups["island"]) == 1:  # a single island has no other to average with
            flight.outcomes = tuple(Outcome(flat, None, state) for flat, state in zip(flats, states, strict=True))
            return
        assert self.exchange is not None
        exchange = self.exchange
        if self._meets_in_full(flight, final):  # else the islands' residuals would be lost
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
        """Apply finished rounds: update the anchors, then load them; after the `final` round all islands are equal."""
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
                self._loop.outer_optimizer.step(fragment.anchors, means, fragment.outer, flight.at)
            keeps_own = arrived and flight.takes_part and not (final or full)
            losses = [stays_of(o, self._islands) if keeps_own else None for o in outcomes]
            carried = self._moved_since(fragment, flight) if keeps_own and flight.left else ()
            self._take_over(fragment, losses, self._loop.alpha if keeps_own else 0.0, carried)
            came = means if arrived else [torch.zeros_like(mean) for mean in means]
            landed.append(SyncResult(fragment.views(came), flight.at.rates))
            flight.let_go([part.state for part in fragment.parts])
        return landed

    def _moved_since(self, fragment: Fragment, flight: PendingSync) -> Sequence[Tensor]:
        """Return the island's movement since its pseudo-gradient was sent."""
        moved = []
        for part, left in zip(fragment.parts, flight.left, strict=True):
            flat = left.neg()
            for name, view in part.views(flat):
                view.add_(self.truth[name])
            moved.append(flat)
        return moved

    def _meets_in_full(self, flight: PendingSync, final: bool) -> bool:
        return self._loop.error_reset and (final or self._loop.meets_in_full(flight.at.number))

    def _anew(self, part: FragmentBucket) -> ExchangeState:
        """Return the exchange's state after a dense average: a new one, unless it holds an error-feedback residual."""
        assert self.exchange is not None
        return part.state if has_residual(self.exchange) else self.exchange.init(part.layout)

    def _take_over(
        self, fragment: Fragment, losses: Sequence[Tensor | None], mix: float, carried: Sequence[Tensor] = ()
    ) -> None:
        """Load the anchor, plus the local movement `carried`, mixed with the local parameters by `alpha`.

        With `keeps` the compression error in `losses` stays in the island's parameters.
        """
        for index, (part, lost) in enumerate(zip(fragment.parts, losses, strict=True)):
            there = part.anchor if lost is None or not self._loop.error_reset else part.anchor - lost
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
        """Average the movement of the step through `each`; an island's compression error stays in its parameters.

        x_i <- was_i - lost_i - mean and anchor <- anchor - mean: their difference is the island's residual.
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
        if not sound:  # undo this island's step, apply the others'
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
        """Load `was` into the parameters."""
        for part in parts:
            for name, view in part.views(part.was):
                self._set(name, view)

    @contextmanager
    def agreed(self, done: int) -> Iterator[None]:
        """Load the anchor into the parameters inside the context; restore this island's own afterwards.

        Nothing changes where the last of `done` steps was synchronous.
        """
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
        """Wait for all pending exchanges before a checkpoint after `done` steps; they are applied when they are due."""
        if self.loop is not None and not self.loop.apart(done - 1):
            self.anchor_here()
        for fragment in self.fragments:
            for under_way in (fragment.flight, fragment.squares):
                if under_way is not None:
                    self._waiting(under_way.wait)

    def part(self) -> None:
        """Set this rank's parameters to the anchor, which is loaded already."""
        self._return(self.fragments)

    def common(self) -> dict[str, Tensor]:
        """Return the anchor (global parameters) by name, as views."""
        return {name: view for part in self._parts() for name, view in part.views(part.anchor)}

    def shared(self) -> dict[str, Tensor]:
        """Return all other state equal on all ranks, after `settle`: outer-optimizer states, counters, pending mean."""
        found: dict[str, Tensor] = {}
        for index, fragment in enumerate(self.fragments):
            found.update(fragment.shared(index, self._loop.outer_optimizer.numbers))
        return found

    def own(self) -> dict[str, Tensor]:
        """Return the state of this rank alone, after `settle`: its parameters and the state of its exchanges."""
        found = {f"at/{name}": self.truth[name] for name in self.common()}
        for index, fragment in enumerate(self.fragments):
            found.update(fragment.own(index))
        return found

    def restore(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `shared` and `own`; those of `common` are loaded already.

        With another number of ranks, entries of `own` may be missing: this rank then starts from the anchor.
        """
        for index, fragment in enumerate(self.fragments):
            fragment.restore(index, self._loop.outer_optimizer.numbers, shared, own)
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
        """Return the number of islands."""
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
    """Return the messages `rank` sends in `loop.cycle` steps, without gradients, weights, votes and status."""
    alone = len(levels.groups["island"]) == 1  # a single island has no other to average with
    found = [Traffic(Collective.GATHER, 2, 8)] * (loop.cycle if loop.step_exchange is not None else 0)
    full, of_squares = among_all(Dense(), levels, keeps=False), exchange_of_second_moments(levels)
    for fragment in exchanges_of_round(loop, params, levels, units=units, bucket_bytes=bucket_bytes):
        found += [Traffic(Collective.GATHER, 4, 8)] * loop.rounds
        for layout, exchange in fragment:
            if alone:
                continue
            rounds = [full if loop.meets_in_full(number) else exchange for number in range(loop.rounds)]
            rounds += [of_squares] * (
                loop.rounds // loop.average_second_moments_every if loop.average_second_moments_every else 0
            )
            for one in rounds:
                found += one.traffic(layout, levels, rank)
            if loop.step_exchange is not None:
                found += among_all(loop.step_exchange, levels, keeps=True).traffic(layout, levels, rank) * loop.cycle
    return tuple(found)


def exchange_of_second_moments(levels: ProcessGroups) -> Exchange:
    """Return the exchange that averages second moments over all ranks.

    The squares of a block differ by many powers of two, so the format has five bits of exponent (e5m2).
    """
    return among_all(TwoShot(Fp8("e5m2")), levels, keeps=False)


def exchanges_of_round(
    loop: OuterLoopConfig,
    params: Mapping[str, Tensor],
    levels: ProcessGroups,
    *,
    units: Sequence[str] = (),
    bucket_bytes: int,
) -> list[list[tuple[Layout, Exchange]]]:
    """Return, fragment by fragment, the buckets of the pseudo-gradients and the exchange of each."""
    exchange = among_all(loop.exchange, levels, keeps=loop.error_reset)
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
    """Return the ranks' weights in the average, by samples seen; None where no rank takes part."""
    if not bool(takes_part.any()):
        return None
    counted = samples if float(samples.sum()) > 0 else takes_part
    return counted / counted.sum()
