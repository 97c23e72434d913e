"""The settings of the outer loop of local-update training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gossamer.exchange import Exchange, is_cumulative
from gossamer.spec.errors import bad_input
from gossamer.sync._local_steps import LocalStepSchedule
from gossamer.sync.outer import OuterOptimizer

LocalSteps: TypeAlias = tuple[int, ...] | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLoopConfig:
    """The settings of local-update training: how often and through which exchange islands average pseudo-gradients.

    Lengths are in steps:

    every:     from one exchange of a parameter to the next (the sync period).
    rule:      the outer optimizer, which updates the global parameters by the mean pseudo-gradient.
    exchange:  how pseudo-gradients are averaged.
    fragments: parts of the model that are exchanged one after the other, every / fragments steps apart.
    delay:     training steps between sending a pseudo-gradient and applying the average.
    mix:       weight of the local parameters when the updated global parameters are loaded: 0 loads those alone.
    carries:   delayed averaging: add to the loaded parameters the local movement since the pseudo-gradient was sent.
               Without it those steps are lost, except for the mix.
    start:     synchronous warm-up steps, in which all ranks average gradients.
    spaced:    in the warm-up all average in each of the first `spaced` steps, then in every second until there were as
               many again, in every fourth, and so on. A local step between two of them is a round by itself. 0: average
               in all steps.
    doubles:   after the warm-up, rounds have one step, and twice as many after every `doubles` steps, up to `every`. 0:
               `every` at once.
    returns:   return to the global parameters when a pseudo-gradient has been sent, as in CO2; they are then updated by
               the pseudo-gradient of the round before.
    keeps:     keep the compression error of an island's pseudo-gradient in its parameters (error reset).
    full:      with `keeps`, every so many rounds is a dense average without loss; 0: only the last one.
    second_moments: every so many rounds average the second moments of the optimizer too, one byte per number. The
               result is applied when the next round is sent, so that nothing waits for it. At first, when little is
               known, in rounds 1, 4, 16 and so on. 0: never.
    patience_s: seconds that the first half of the islands waits for the others at the end of a round, which then
               continues without them. 0: without limit.
    each:      exchange that averages the movement of every single step, beside the rounds; None: no such average.
    steps:     inner steps of each island in a round of `every`, the fastest all of them; empty: all. `auto`: as many as
               each has time for while the fastest makes all, measured before the first round.

    Raise BadInput where they do not go together.
    """

    every: int
    rule: OuterOptimizer
    exchange: Exchange
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    carries: bool = False
    start: int = 0
    spaced: int = 0
    doubles: int = 0
    returns: bool = False
    keeps: bool = False
    full: int = 0
    second_moments: int = 0
    patience_s: float = 0.0
    each: Exchange | None = None
    steps: LocalSteps = ()

    def __post_init__(self) -> None:
        _demand(self.every >= 1, "every", "a period of at least 1 step", self.every, "1 exchanges after every step")
        fits = 1 <= self.fragments <= self.every
        _demand(fits, "fragments", f"1 to {self.every} fragments (every)", self.fragments, "each has a step of its own")
        longest = self.every if self.returns else self.every - 1
        fits = 0 <= self.delay <= longest
        do = "an exchange must end before the next one of the same parameters begins: raise every"
        _demand(fits, "delay", f"a delay of 0 to {longest} steps", self.delay, do)
        _demand(0 <= self.mix <= 1, "mix", "a part from 0 to 1", self.mix, "0 takes the common parameters alone")
        _demand(self.full >= 0, "full", "a number of rounds from 0 on", self.full, "0 meets in full in the end alone")
        do = "0 leaves to each island its own"
        _demand(self.second_moments >= 0, "second_moments", "a number of rounds from 0 on", self.second_moments, do)
        fits = 0 <= self.patience_s < math.inf
        _demand(fits, "patience_s", "0 seconds or more", self.patience_s, "0 waits for as long as it takes")
        plain = not (self.returns or self.keeps or self.each is not None or self.spaced or self.doubles)
        do = "what an island owes, or meets of every step, is of all islands: such a loop waits for all"
        _demand(plain or not self.patience_s, "patience_s", "0", self.patience_s, do)
        do = "in this exchange who is left out goes on being counted with what it sent before: take error_feedback"
        _demand(not (self.patience_s and is_cumulative(self.exchange)), "patience_s", "0", self.patience_s, do)
        _demand(self.start >= 0, "start", "a number of steps from 0 on", self.start, "0 parts the islands at once")
        do = "0 lets all gradients meet in all steps before start"
        _demand(self.spaced >= 0, "spaced", "a number of steps from 0 on", self.spaced, do)
        _demand(self.doubles >= 0, "doubles", "a number of steps from 0 on", self.doubles, "0 does not let rounds grow")
        whole = self.fragments == 1 and not self.delay and not self.steps
        do = "rounds of one step are of the whole model, without delay, and everybody makes all steps"
        _demand(whole or not self.spaced + self.doubles, "fragments", "one fragment", self.fragments, do)
        if self.steps and self.steps != "auto" and (min(self.steps) < 1 or max(self.steps) != self.every):
            wanted = f"1 to {self.every} steps, and of one island {self.every} (every)"
            do = "the fastest makes all steps of a round"
            raise bad_input(wanted=wanted, got=str(list(self.steps)), do=do, key="steps")

    def apart(self, done: int) -> bool:
        """Return whether the step after `done` others is a local step (gradients averaged within islands only).

        False where `done` is negative.
        """
        if done >= self.start or done < 0 or not self.spaced:
            return done >= self.start
        distance = 1 << (done // self.spaced + 1).bit_length() - 1  # between synchronous steps at this point
        return (done - self.spaced * (distance - 1)) % distance > 0

    def steps_of(self, islands: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the inner steps of a round by island. Raise BadInput where `steps` has another number of islands."""
        if not self.steps:
            return (self.every,) * len(islands)
        assert self.steps != "auto", "it is measured when all ranks are there"
        if len(self.steps) != len(islands):
            raise bad_input(
                wanted=f"the steps of {len(islands)} islands, {[list(i) for i in islands]}",
                got=str(list(self.steps)),
                do="give one number for each, in this order, or auto",
                key="plan.sync.steps",
            )
        return self.steps

    def pace(self, islands: Sequence[Sequence[int]]) -> LocalStepSchedule:
        """Return the schedule of each rank's inner steps."""
        pairs = zip(islands, self.steps_of(islands), strict=True)
        by_rank = {rank: n for ranks, n in pairs for rank in ranks}
        return LocalStepSchedule(self.every, self.start, tuple(by_rank[rank] for rank in sorted(by_rank)))

    @property
    def cycle(self) -> int:
        """Return the number of steps after which the communication repeats itself."""
        return self.every * self.rounds

    @property
    def rounds(self) -> int:
        """Return the number of rounds of a fragment after which its communication repeats itself."""
        return math.lcm(max(1, self.full), max(1, self.second_moments))

    def tells(self, number: int) -> bool:
        """Return whether second moments are sent in this round of a fragment, counted from 0."""
        every, at = self.second_moments, number + 1
        is_power_of_four = at.bit_count() == 1 and at.bit_length() % 2 == 1
        return every > 0 and (at % every == 0 or (at < every and is_power_of_four))

    def meets_in_full(self, number: int) -> bool:
        """Return whether this round of a fragment, counted from 0, is a dense average, which leaves no residual."""
        return self.full > 0 and (number + 1) % self.full == 0

    def sends(self, fragment: int, done: int) -> bool:
        """Return whether a fragment's pseudo-gradient is sent after `done` steps."""
        if done <= self.start:
            return self.apart(done - 1)
        period = self._period(done)
        since = done - self.start - (fragment * period) // self.fragments
        return since >= 0 and since % period == 0

    @property
    def steady(self) -> int:
        """Return the number of steps before all rounds have `every` steps: warm-up and growing rounds."""
        return self.start + self.doubles * (self.every - 1).bit_length()

    def _period(self, done: int) -> int:
        """Return the steps of a round that ends after `done` steps, more than `start`."""
        if not self.doubles:
            return self.every
        return min(self.every, 1 << min((done - self.start - 1) // self.doubles, self.every.bit_length()))


def _demand(holds: bool, key: str, wanted: str, got: float, do: str) -> None:
    if not holds:
        raise bad_input(wanted=wanted, got=f"{got:g}", do=do, key=key)
