"""The average of the movement of every single step over all ranks, beside the rounds of the outer loop."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ExchangeContext
from gossamer.exchange import Exchange
from gossamer.sync._fragments import are_finite
from gossamer.sync._gradient_reducer import GradientReducer
from gossamer.sync._group_error import stays_of
from gossamer.sync._replica_parameters import ReplicaParameters
from gossamer.sync._sync_round import LocalStep, begin_exchange, weights_of
from gossamer.sync._timing import Timing


@dataclass(frozen=True, slots=True)
class StepAverage:
    """The exchange of single steps on one rank. `exchange`: among all ranks; `timing`: counts the time waited."""

    exchange: Exchange
    replica: GradientReducer
    pump: CommThread | None
    local: ReplicaParameters
    timing: Timing

    def after(self, moved: LocalStep) -> None:
        """Average the movement of the step; an island's compression error stays in its parameters.

        x_i <- was_i - lost_i - mean and anchor <- anchor - mean: their difference is the island's residual.
        """
        parts, levels = list(self.local.parts()), self.replica.levels
        steps = [self.local.step_pseudo_gradient(part) for part in parts]
        sound = are_finite(steps)
        row = (moved.samples if sound else 0.0, float(sound))
        weights = weights_of(*self.timing.timed_wait(lambda: self.replica.gather(row)).unbind(1))
        if not sound:  # undo this island's step, apply the others'
            for flat in steps:
                flat.zero_()
        if weights is None:
            self.local.follow(parts)
            return
        at = ExchangeContext(self.replica.rank, levels, weights, (moved.seed, moved.done), 1.0, True)
        step = begin_exchange(self.pump, self.exchange, parts, steps, [part.each for part in parts], at)
        outcomes = self.timing.timed_wait(lambda: [step.result(i) for i in range(len(parts))])
        for part, outcome in zip(parts, outcomes, strict=True):
            part.each = outcome.state
            part.anchor.sub_(outcome.mean)
            part.was.sub_(outcome.mean)
            stays = stays_of(outcome, len(levels.groups["island"]))
            if stays is not None and sound:
                part.was.sub_(stays)
        self.local.follow(parts)
