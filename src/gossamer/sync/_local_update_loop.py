"""The outer loop of local-update training: local steps, pseudo-gradients, outer optimizer.

Each replica group (one island) takes inner steps from the global parameters, here called the anchor. From time to time
all groups average their pseudo-gradients (anchor minus local parameters). The outer optimizer updates the anchor, the
same on all groups, and each group continues from there. The fragments of the model take turns, and training continues
while an exchange is in flight: pseudo-gradients have process groups and a communication thread of their own, so no
inner step waits behind them.

After the update of training step t the trainer calls `after`, which does three things:
    land     applies the fragments whose exchange is `sync_delay` steps old: outer step, then load the anchor
    leave    takes the pseudo-gradients of the fragments that are due, and gathers who takes part with what weight
    launch   starts their exchange; with a delay of 0 applies it at once
With `straggler_timeout_s` a thread of every rank gathers and launches (`QuorumThread`). A rank of a late island then
sends zeros, at weight 0, and applies the result of the round like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Layout, as_float, partition
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ExchangeState, ProcessGroups
from gossamer.exchange import Exchange, compile_kernels
from gossamer.sync._fragments import (
    Fragment,
    FragmentBucket,
    FragmentProgress,
    SyncLaunch,
    are_finite,
    fragments_of,
)
from gossamer.sync._gradient_reducer import GradientReducer
from gossamer.sync._group_error import among_all, stays_of
from gossamer.sync._outer_config import OuterLoopConfig
from gossamer.sync._outer_loop import NoOuterLoop, OuterLoop
from gossamer.sync._outer_state import own_state, restore_state, shared_state
from gossamer.sync._quorum import QuorumThread
from gossamer.sync._quorum_rounds import QuorumRounds
from gossamer.sync._replica_parameters import ReplicaParameters
from gossamer.sync._step_average import StepAverage
from gossamer.sync._sync_round import LocalContribution, LocalStep, RoundSender, SecondMoments, SyncResult
from gossamer.sync._timing import Timing


@dataclass(slots=True)
class LocalUpdateLoop(OuterLoop):
    """The outer loop of local-update training on one rank: global parameters, outer optimizer and pending rounds.

    `each`: the average of single steps, where there is one. `timing`: seconds waited since they were last set to 0.
    """

    replica: GradientReducer
    local: ReplicaParameters
    timing: Timing
    sender: RoundSender
    each: StepAverage | None
    roll: QuorumThread[LocalContribution, list[SyncLaunch]] | None  # with `straggler_timeout_s` only
    _ends: tuple[int, int] = (0, 0)  # the last step of the run, and its seed

    @property
    def loop(self) -> OuterLoopConfig:
        """Return the settings of the loop."""
        return self.sender.loop

    @property
    def fragments(self) -> Sequence[Fragment]:
        return self.local.fragments

    @property
    def exposed_s(self) -> float:
        """Return the seconds waited since they were last set to 0."""
        return self.timing.exposed_s

    @exposed_s.setter
    def exposed_s(self, seconds: float) -> None:
        self.timing.exposed_s = seconds

    def begin(self, done: int, steps: int, seed: int) -> None:
        """Start after `done` of the run's `steps`, once the state is restored."""
        self._ends = steps, seed
        if self.loop.apart(done):
            self._call_from(done)

    def _call_from(self, done: int) -> None:
        """Start the quorum thread for the rounds after `done` steps."""
        if self.roll is not None:
            rounds = QuorumRounds.of(self.sender, done, *self._ends)
            self.roll.begin(rounds.deadlines(), rounds.contribute)

    def close(self) -> None:
        """End the quorum thread, if there is one."""
        if self.roll is not None:
            self.roll.close()

    def is_late(self, done: int) -> bool:
        """Return whether a round that ends after more than `done` steps has continued without this island.

        The island then skips the remaining inner steps of that round. All ranks of an island must call this together.
        """
        if self.roll is None or not self.loop.apart(done):
            return False
        return float(self.replica.gather((float(self.roll.missed),), "island").max()) > done

    def anchor_here(self) -> None:
        """Set the anchor (global parameters) to this rank's parameters, which must be equal on all islands."""
        self.local.anchor_here()

    @property
    def factor(self) -> float:
        """Return the factor on the learning rate of the inner steps: the outer optimizer's, averaged over fragments."""
        found = [self.loop.outer_optimizer.inner_factor(fragment.outer) for fragment in self.fragments]
        return sum(found) / len(found)

    @torch.no_grad()
    def after(self, moved: LocalStep) -> list[SyncResult]:
        """Advance the outer loop by one training step and return the results of the rounds that ended with it.

        `moved`: the step; one without an update has rate 0 and 0 samples.
        """
        loop = self.loop
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
            self.each.after(moved)
        landing = [
            f for f in self.fragments if f.flight and (moved.last or moved.done - f.flight.since >= loop.overlap.delay)
        ]
        leaving = self.sender.due(moved.done, last=moved.last)
        landed: list[SyncResult] = []
        if not loop.overlap.reset_to_global:
            landed += self._land(landing, final=False)  # in the last step they are sent once more
        gone = [self.local.pseudo_gradient(f) for f in leaving]
        if loop.overlap.reset_to_global:
            # What is applied was sent a round ago, and the island restarts from the new anchor.
            landed += self._land(landing, final=moved.last)
            self.local.return_to(leaving)
        landed += self._learn(leaving)
        landed += self._launch(leaving, gone, moved)
        if moved.last or not loop.overlap.delay:
            landed += self._land([f for f in leaving if f.flight], final=moved.last)
        return landed

    def _launch(self, leaving: Sequence[Fragment], gone: Sequence[list[Tensor]], moved: LocalStep) -> list[SyncResult]:
        """Start the exchange of the pseudo-gradients `gone`.

        Return the results of rounds in which no rank takes part, which end at once.
        """
        if not leaving:
            return []
        here = [self._left(fragment, flats) for fragment, flats in zip(leaving, gone, strict=True)]
        is_there, launched = self._contribute(leaving, gone, moved)
        ended = []
        for fragment, left, one in zip(leaving, here, launched, strict=True):
            fragment.steps, fragment.made, fragment.rates, fragment.samples = 0, 0, 0.0, 0.0
            if one.flight is None or not is_there:
                self.local.return_to([fragment])
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

    def _contribute(
        self, leaving: Sequence[Fragment], gone: Sequence[list[Tensor]], moved: LocalStep
    ) -> tuple[bool, list[SyncLaunch]]:
        """Gather who takes part, without islands whose pseudo-gradient is not finite, and send what is `gone`.

        Return whether the round has this rank's contribution, and the launched sync of each fragment.
        """
        row: list[float] = []
        brought = LocalContribution(gone, [are_finite(flats) for flats in gone])
        for fragment, ok in zip(leaving, brought.sound, strict=True):
            row += [fragment.samples if ok else 0.0, float(ok), fragment.rates, float(fragment.made)]
        if (roll := self.roll) is not None:
            call, launched = self.timing.timed_wait(lambda: roll.answer(moved.done, tuple(row), brought))
            return call.present[self.replica.rank], launched
        rows = self.timing.timed_wait(lambda: self.replica.gather(tuple(row)))  # (ranks, 4 per fragment)
        courses = [FragmentProgress(f.rounds, [part.state for part in f.parts], None) for f in leaving]
        return True, self.sender.contribute(leaving, courses, rows, brought, moved.done, moved.seed, last=moved.last)

    def _left(self, fragment: Fragment, gone: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return this rank's parameters when the pseudo-gradient `gone` is sent; empty unless `carries`."""
        if not self.loop.overlap.keep_local_progress:
            return ()
        if not gone:
            return tuple(part.anchor.clone() for part in fragment.parts)
        return tuple(part.anchor - flat for part, flat in zip(fragment.parts, gone, strict=True))

    def _learn(self, leaving: Sequence[Fragment]) -> list[SyncResult]:
        """Return the second moments that were sent with the round before."""
        found = []
        for fragment in leaving:
            squares, fragment.squares = fragment.squares, None
            means = self.timing.timed_wait(squares.wait) if squares is not None else ()
            if means and are_finite(means):  # the same bits on all ranks
                found.append(SyncResult({}, 0.0, fragment.views(means)))
        return found

    def _land(self, landing: Sequence[Fragment], *, final: bool) -> list[SyncResult]:
        """Apply finished rounds: update the anchors, then load them; after the `final` round all islands are equal."""
        loop, islands, landed = self.loop, len(self.replica.levels.groups["island"]), []
        for fragment in landing:
            flight, fragment.flight = fragment.flight, None
            assert flight is not None
            outcomes = self.timing.timed_wait(flight.wait)
            full = self.sender.meets_in_full(flight, final=final)
            means = [o.mean.float() for o in outcomes]
            arrived = are_finite(means)  # the same bits on all ranks
            if arrived:
                for part, outcome in zip(fragment.parts, outcomes, strict=True):
                    part.state = self.sender.renewed(part) if full else outcome.state
                loop.outer_optimizer.step(fragment.anchors, means, fragment.outer, flight.at)
            keeps_own = arrived and flight.takes_part and not (final or full)
            losses = [stays_of(o, islands) if keeps_own and loop.error_reset else None for o in outcomes]
            carried = self.local.moved_since(fragment, flight) if keeps_own and flight.left else ()
            self.local.take_over(fragment, losses, loop.overlap.alpha if keeps_own else 0.0, carried)
            came = means if arrived else [torch.zeros_like(mean) for mean in means]
            landed.append(SyncResult(fragment.views(came), flight.at.rates))
            flight.free_buffers([part.state for part in fragment.parts])
        return landed

    @contextmanager
    def agreed(self, done: int) -> Iterator[None]:
        """Load the anchor into the parameters inside the context; restore this island's own afterwards.

        Nothing changes where the last of `done` steps was synchronous.
        """
        if not self.loop.apart(done - 1):
            yield
            return
        with self.local.replaced():
            yield

    def settle(self, done: int) -> None:
        """Wait for all pending exchanges before a checkpoint after `done` steps; they are applied when they are due."""
        if not self.loop.apart(done - 1):
            self.anchor_here()
        for fragment in self.fragments:
            for under_way in (fragment.flight, fragment.squares):
                if under_way is not None:
                    self.timing.timed_wait(under_way.wait)

    def part(self) -> None:
        """Set this rank's parameters to the anchor, which is loaded already."""
        self.local.return_to(self.fragments)

    def common(self) -> dict[str, Tensor]:
        """Return the anchor (global parameters) by name, as views."""
        return self.local.common()

    def shared(self) -> dict[str, Tensor]:
        """Return all other state equal on all ranks, after `settle`: outer-optimizer states, counters, pending mean."""
        return shared_state(self.fragments, self.loop.outer_optimizer.numbers)

    def own(self) -> dict[str, Tensor]:
        """Return the state of this rank alone, after `settle`: its parameters and the state of its exchanges."""
        return own_state(self.local)

    def restore(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `shared` and `own`; those of `common` are loaded already.

        With another number of ranks, entries of `own` may be missing: this rank then starts from the anchor.
        """
        restore_state(self.local, self.loop.outer_optimizer.numbers, shared, own)


def outer_loop_of(
    loop: OuterLoopConfig | None,
    params: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    replica: GradientReducer,
    pump: CommThread | None,
    *,
    units: Sequence[str] = (),
    bucket_bytes: int,
    second_moments: SecondMoments = lambda names: {},
    asked: Callable[[], int] = lambda: 0,
) -> OuterLoop:
    """Build the outer loop of one rank; without `loop`, one that does nothing. All islands must hold the same
    parameters now.

    `params`: the trained parameters by name; `truth`: by the same names the float32 master weights, which the optimizer
    updates in place of parameters in half types. `pump`: a communication thread over the groups of
    `ProcessGroups.twice`, used for nothing else. `second_moments`: returns this island's current ones. `asked`: returns
    this rank's request to stop, which the rounds report where they do not wait for stragglers. Raise BadInput
    where an exchange cannot serve a bucket or these process groups.
    """
    if loop is None:
        return NoOuterLoop()
    levels, timing = replica.levels, Timing()
    exchange = among_all(loop.exchange, levels, keeps=loop.error_reset)
    each = among_all(loop.step_exchange, levels, keeps=True) if loop.step_exchange is not None else None
    fragments = []
    for names in fragments_of(truth, loop.fragments, units):
        layouts = partition({n: truth[n] for n in names}, bucket_bytes=bucket_bytes)
        parts = [_part(as_float(layout), exchange, each, levels) for layout in layouts]
        fragments.append(Fragment(parts, loop.outer_optimizer.init([part.anchor for part in parts])))
    local = ReplicaParameters(params, truth, fragments)
    roll: QuorumThread[LocalContribution, list[SyncLaunch]] | None = None
    if loop.straggler_timeout_s and levels.has_several("island"):
        assert pump is not None
        roll = QuorumThread(pump.channel, loop.straggler_timeout_s, asked)
    sender = RoundSender(loop, exchange, replica, pump, fragments, second_moments)
    average = StepAverage(each, replica, pump, local, timing) if each is not None else None
    found = LocalUpdateLoop(replica, local, timing, sender, average, roll)
    found.anchor_here()
    return found


def _part(layout: Layout, exchange: Exchange, each: Exchange | None, levels: ProcessGroups) -> FragmentBucket:
    exchange.check(layout, levels)
    compile_kernels(exchange, layout.device)
    if each is not None:
        each.check(layout, levels)
        compile_kernels(each, layout.device)
    room = torch.zeros(layout.numel, device=layout.device)
    was, state = (
        (torch.zeros_like(room), each.init(layout)) if each is not None else (room.new_empty(0), ExchangeState())
    )
    return FragmentBucket(layout, room, exchange.init(layout), was, state)
