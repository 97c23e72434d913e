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
class SyncWarmup:
    """The beginning of local-update training: synchronous warm-up steps, then rounds that grow.

    steps: synchronous warm-up steps, in which all ranks average gradients.
    var_update_scaler: in the warm-up all average in each of the first so many steps, then in every second until there
        were as many again, in every fourth, and so on. A local step between two of them is a round by itself. 0:
        average in all steps.
    local_step_scaler: after the warm-up, rounds have one step, and twice as many after every so many steps, up to
        `sync_every`. 0: `sync_every` at once.
    """

    steps: int = 0
    var_update_scaler: int = 0
    local_step_scaler: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOverlap:
    """The overlap of training with the exchange of a pseudo-gradient, and the local steps taken meanwhile.

    delay: training steps between sending a pseudo-gradient and applying the average.
    alpha: weight of the local parameters when the updated global parameters are loaded: 0 loads those alone.
    keep_local_progress: delayed averaging: add to the loaded parameters the local movement since the pseudo-gradient
        was sent. Without it those steps are lost, except for alpha's part.
    reset_to_global: return to the global parameters when a pseudo-gradient has been sent, as in CO2; they are then
        updated by the pseudo-gradient of the round before.
    """

    delay: int = 0
    alpha: float = 0.0
    keep_local_progress: bool = False
    reset_to_global: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLoopConfig:
    """The settings of local-update training: how often and through which exchange islands average pseudo-gradients.

    Lengths are in steps:

    sync_every: from one exchange of a parameter to the next (the sync period).
    outer_optimizer: updates the global parameters by the mean pseudo-gradient.
    exchange: how pseudo-gradients are averaged.
    warmup: synchronous steps at first, and growing rounds after them.
    overlap: what islands do with the steps they take while a pseudo-gradient is in flight.
    fragments: parts of the model that are exchanged one after the other, sync_every / fragments steps apart.
    error_reset: keep the compression error of an island's pseudo-gradient in its parameters (error reset).
    global_sync_every: with `error_reset`, every so many rounds is a dense average without loss; 0: only the last one.
    average_second_moments_every: every so many rounds average the second moments of the optimizer too, one byte per
        number. The result is applied when the next round is sent, so that nothing waits for it. At first, when little
        is known, in rounds 1, 4, 16 and so on. 0: never.
    straggler_timeout_s: seconds that the first half of the islands waits for the others at the end of a round, which
        then continues without them. 0: without limit.
    step_exchange: exchange that averages the movement of every single step, beside the rounds; None: no such average.
    local_steps: inner steps of each island in a round of `sync_every`, the fastest all of them; empty: all. `auto`: as
        many as each has time for while the fastest makes all, measured before the first round.

    Raise BadInput where they do not go together.
    """

    sync_every: int
    outer_optimizer: OuterOptimizer
    exchange: Exchange
    fragments: int = 1
    overlap: SyncOverlap = SyncOverlap()
    warmup: SyncWarmup = SyncWarmup()
    error_reset: bool = False
    global_sync_every: int = 0
    average_second_moments_every: int = 0
    straggler_timeout_s: float = 0.0
    step_exchange: Exchange | None = None
    local_steps: LocalSteps = ()

    def __post_init__(self) -> None:
        self._check_period()
        self._check_rounds()
        self._check_stragglers()
        self._check_warmup()
        self._check_local_steps()

    def _check_period(self) -> None:
        """Check the sync period, and what of it fragments, delay and mixing take."""
        every, do = self.sync_every, "give 1 to exchange after every step, or more"
        _demand(every >= 1, "sync_every", "a period of at least 1 step", every, do)
        fits, wanted = 1 <= self.fragments <= every, f"1 to {every} fragments (sync_every is {every})"
        do = "lower fragments or raise sync_every: each fragment is sent after a different step"
        _demand(fits, "fragments", wanted, self.fragments, do)
        longest = every if self.overlap.reset_to_global else every - 1
        fits = 0 <= self.overlap.delay <= longest
        do = "lower sync_delay or raise sync_every: an exchange ends before the next one of the same parameters begins"
        _demand(fits, "sync_delay", f"a delay of 0 to {longest} steps", self.overlap.delay, do)
        alpha, do = self.overlap.alpha, "give 0 to load the global parameters alone"
        _demand(0 <= alpha <= 1, "alpha", "a mixing factor from 0 to 1", alpha, do)

    def _check_rounds(self) -> None:
        """Check the numbers of rounds after which one is dense, or averages second moments."""
        key, wanted = "global_sync_every", "0 or more rounds"
        do = "give 0 for a dense average in the last round alone"
        _demand(self.global_sync_every >= 0, key, wanted, self.global_sync_every, do)
        key, do = "average_second_moments_every", "give 0 to average no second moments"
        _demand(self.average_second_moments_every >= 0, key, wanted, self.average_second_moments_every, do)

    def _check_stragglers(self) -> None:
        """Check the timeout for late islands, and that the other settings let a round end without them."""
        key, patience_s = "straggler_timeout_s", self.straggler_timeout_s
        _demand(0 <= patience_s < math.inf, key, "0 seconds or more", patience_s, "give 0 to wait without limit")
        plain = not (
            self.overlap.reset_to_global
            or self.error_reset
            or self.step_exchange is not None
            or self.warmup.var_update_scaler
            or self.warmup.local_step_scaler
        )
        wanted = "0 in a sync method that needs all islands in every round, as with error_reset or step_exchange"
        _demand(plain or not patience_s, key, wanted, patience_s, "set straggler_timeout_s to 0")
        wanted = "0 with an EF21 exchange, which keeps counting the last message of an island that missed a round"
        do = "set straggler_timeout_s to 0, or use the exchange {error_feedback: {topk: {fraction: 0.01}}}"
        _demand(not (patience_s and is_cumulative(self.exchange)), key, wanted, patience_s, do)

    def _check_warmup(self) -> None:
        """Check the synchronous steps at first, and the rounds that grow after them."""
        wanted, do = "0 or more steps", "give 0 for local steps from the first step on"
        _demand(self.warmup.steps >= 0, "warmup_steps", wanted, self.warmup.steps, do)
        do = "give 0 to average the gradients of all ranks in every warm-up step"
        _demand(self.warmup.var_update_scaler >= 0, "var_update_scaler", wanted, self.warmup.var_update_scaler, do)
        do = "give 0 for rounds of full length after the warm-up"
        _demand(self.warmup.local_step_scaler >= 0, "local_step_scaler", wanted, self.warmup.local_step_scaler, do)
        whole = self.fragments == 1 and not self.overlap.delay and not self.local_steps
        fits = whole or not self.warmup.var_update_scaler + self.warmup.local_step_scaler
        if not fits:
            delay, steps = self.overlap.delay, self.local_steps
            raise bad_input(
                wanted="1 fragment, sync_delay 0 and no local_steps with var_update_scaler or local_step_scaler",
                got=f"{self.fragments} fragments, sync_delay {delay} and local_steps {steps or 'none'}",
                do="change those three, or set var_update_scaler and local_step_scaler to 0",
                key="fragments",
            )

    def _check_local_steps(self) -> None:
        """Check that the fastest island makes all steps of a round, and the others at least one."""
        if (
            self.local_steps
            and self.local_steps != "auto"
            and (min(self.local_steps) < 1 or max(self.local_steps) != self.sync_every)
        ):
            most = self.sync_every
            wanted = f"1 to {most} steps for every island, and {most} (sync_every) for at least one"
            do = f"give the fastest island {most} steps, and each other one 1 to {most}"
            raise bad_input(wanted=wanted, got=str(list(self.local_steps)), do=do, key="local_steps")

    def apart(self, done: int) -> bool:
        """Return whether the step after `done` others is a local step (gradients averaged within islands only).

        False where `done` is negative.
        """
        every = self.warmup.var_update_scaler
        if done >= self.warmup.steps or done < 0 or not every:
            return done >= self.warmup.steps
        distance = 1 << (done // every + 1).bit_length() - 1  # between synchronous steps at this point
        return (done - every * (distance - 1)) % distance > 0

    def steps_of(self, islands: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the inner steps of a round by island. Raise BadInput if `local_steps` is for other islands."""
        if not self.local_steps:
            return (self.sync_every,) * len(islands)
        assert self.local_steps != "auto", "it is measured when all ranks are there"
        if len(self.local_steps) != len(islands):
            raise bad_input(
                wanted=f"one number of local steps for each of {len(islands)} islands, {[list(i) for i in islands]}",
                got=str(list(self.local_steps)),
                do=f"list {len(islands)} numbers in the order of the islands, or write auto",
                key="plan.sync.local_steps",
            )
        return self.local_steps

    def pace(self, islands: Sequence[Sequence[int]]) -> LocalStepSchedule:
        """Return the schedule of each rank's inner steps."""
        pairs = zip(islands, self.steps_of(islands), strict=True)
        by_rank = {rank: n for ranks, n in pairs for rank in ranks}
        return LocalStepSchedule(self.sync_every, self.warmup.steps, tuple(by_rank[rank] for rank in sorted(by_rank)))

    @property
    def cycle(self) -> int:
        """Return the number of steps after which the communication repeats itself."""
        return self.sync_every * self.rounds

    @property
    def rounds(self) -> int:
        """Return the number of rounds of a fragment after which its communication repeats itself."""
        return math.lcm(max(1, self.global_sync_every), max(1, self.average_second_moments_every))

    def tells(self, number: int) -> bool:
        """Return whether second moments are sent in this round of a fragment, counted from 0."""
        every, at = self.average_second_moments_every, number + 1
        is_power_of_four = at.bit_count() == 1 and at.bit_length() % 2 == 1
        return every > 0 and (at % every == 0 or (at < every and is_power_of_four))

    def meets_in_full(self, number: int) -> bool:
        """Return whether this round of a fragment, counted from 0, is a dense average, which leaves no residual."""
        return self.global_sync_every > 0 and (number + 1) % self.global_sync_every == 0

    def sends(self, fragment: int, done: int) -> bool:
        """Return whether a fragment's pseudo-gradient is sent after `done` steps."""
        if done <= self.warmup.steps:
            return self.apart(done - 1)
        period = self._period(done)
        since = done - self.warmup.steps - (fragment * period) // self.fragments
        return since >= 0 and since % period == 0

    @property
    def steady(self) -> int:
        """Return the number of steps before all rounds have `sync_every` steps: warm-up and growing rounds."""
        return self.warmup.steps + self.warmup.local_step_scaler * (self.sync_every - 1).bit_length()

    def _period(self, done: int) -> int:
        """Return the steps of a round that ends after `done` steps, more than `warmup_steps`."""
        if not self.warmup.local_step_scaler:
            return self.sync_every
        return min(
            self.sync_every,
            1 << min((done - self.warmup.steps - 1) // self.warmup.local_step_scaler, self.sync_every.bit_length()),
        )


def _demand(holds: bool, key: str, wanted: str, got: float, do: str) -> None:
    if not holds:
        raise bad_input(wanted=wanted, got=f"{got:g}", do=do, key=key)
