"""One round of a fragment, as a rank sends it: who takes part with what weight, and the exchange that it starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import ExchangeContext, ExchangeState, late, sent_at
from gossamer.exchange import Exchange, has_residual
from gossamer.exchange.dense import Dense
from gossamer.sync._fragments import (
    Fragment,
    FragmentBucket,
    FragmentProgress,
    PendingSync,
    SecondMomentSync,
    SyncLaunch,
)
from gossamer.sync._gradient_reducer import GradientReducer
from gossamer.sync._group_error import among_all
from gossamer.sync._outer_config import OuterLoopConfig
from gossamer.sync._round_traffic import exchange_of_second_moments
from gossamer.sync.outer import OuterStep

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


@dataclass(frozen=True, slots=True)
class RoundSender:
    """The sender of one rank's contributions to the rounds of the fragments, from whichever thread calls it.

    `exchange`: of pseudo-gradients, among all ranks. `pump`: a communication thread over the groups of
    `ProcessGroups.twice`, used for nothing else. `second_moments`: returns this island's current ones, of these
    parameters.
    """

    loop: OuterLoopConfig
    exchange: Exchange
    replica: GradientReducer
    pump: CommThread | None
    fragments: Sequence[Fragment]
    second_moments: SecondMoments

    def due(self, done: int, *, last: bool = False) -> list[Fragment]:
        """Return the fragments that are due to be sent after `done` steps."""
        return [f for i, f in enumerate(self.fragments) if last or self.loop.sends(i, done)]

    def contribute(
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
        """Start the exchanges of the fragments `leaving`; return one SyncLaunch for each.

        rows   (ranks, 4 per fragment) float64: samples, takes part (0 or 1), sum of learning rates and steps of
               every rank; ranks are weighted by samples
        gone   this rank's pseudo-gradients
        done   steps so far
        """
        found = []
        for index, (fragment, course) in enumerate(zip(leaving, courses, strict=True)):
            samples, takes_part, *gone_by = rows[:, 4 * index : 4 * index + 4].unbind(1)
            weights, flats, sound = weights_of(samples, takes_part), gone.flats[index], gone.sound[index]
            if weights is None:  # no rank takes part
                found.append(SyncLaunch(None))
                continue
            rates, steps = (float((weights * of).sum()) for of in gone_by)
            at = OuterStep(course.rounds, steps, rates, (seed, done, self.fragments.index(fragment)))
            if not sound:
                for flat in flats:
                    flat.zero_()
            flight = PendingSync(done, at, sound, None)
            levels = self.replica.levels
            here = ExchangeContext(self.replica.rank, levels, weights, at.key[:2], 1.0, self.loop.error_reset)
            self._exchange(fragment, flight, flats, course.now(), here, final=last)
            tells = self.loop.tells(at.number) and not last
            found.append(SyncLaunch(flight, self._tell(fragment, here, sound=sound) if tells else None))
        return found

    def _tell(self, fragment: Fragment, at: ExchangeContext, *, sound: bool) -> SecondMomentSync | None:
        """Start to average second moments, where the optimizer has any."""
        squares = self.second_moments([e.name for part in fragment.parts for e in part.layout.entries])
        if not at.levels.has_several("island") or not squares:
            return None
        flats = [torch.zeros_like(part.anchor) for part in fragment.parts]
        if sound:
            for part, flat in zip(fragment.parts, flats, strict=True):
                for name, view in part.views(flat):
                    view.copy_(squares[name])
        exchange = exchange_of_second_moments(at.levels)
        states = [exchange.init(part.layout) for part in fragment.parts]
        step = begin_exchange(self.pump, exchange, fragment.parts, flats, states, replace(at, accounts=False))
        return SecondMomentSync(step)

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
        exchange = self.exchange
        if self.meets_in_full(flight, final=final):  # else the islands' residuals would be lost
            exchange = among_all(Dense(), at.levels, keeps=False)
            states = [exchange.init(part.layout) for part in fragment.parts]
        flight.under_way = begin_exchange(self.pump, exchange, fragment.parts, flats, states, at)

    def meets_in_full(self, flight: PendingSync, *, final: bool) -> bool:
        """Return whether a round is a dense average, which leaves no compression error in the island's parameters."""
        return self.loop.error_reset and (final or self.loop.meets_in_full(flight.at.number))

    def renewed(self, part: FragmentBucket) -> ExchangeState:
        """Return the exchange's state after a dense average: a new one, unless it holds an error-feedback residual."""
        return part.state if has_residual(self.exchange) else self.exchange.init(part.layout)


def begin_exchange(
    pump: CommThread | None,
    exchange: Exchange,
    parts: Sequence[FragmentBucket],
    flats: Sequence[Tensor],
    states: Sequence[ExchangeState],
    at: ExchangeContext,
) -> CommStep:
    """Start to average `flats`, buffers like the anchors of `parts`, one job each."""
    assert pump is not None
    step = pump.begin([len(exchange.traffic(part.layout, at.levels, at.rank)) for part in parts])
    for index, (part, flat, state) in enumerate(zip(parts, flats, states, strict=True)):
        step.submit(index, sent_at(exchange.run(Bucket(part.layout, flat), state, at), late))
    return step


def weights_of(samples: Tensor, takes_part: Tensor) -> Tensor | None:
    """Return the ranks' weights in the average, by samples seen; None where no rank takes part."""
    if not bool(takes_part.any()):
        return None
    counted = samples if float(samples.sum()) > 0 else takes_part
    return counted / counted.sum()
