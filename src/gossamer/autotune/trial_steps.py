"""Time steps with an exchange before training: forward, backward and messages as in the run; nothing is kept.

A machine computes faster at one time than at another, by more than what sets exchanges apart: others use it, it becomes
hot. So passes that send nothing are timed before and after each trial, and trials are compared at one speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.model.side_effects import untouched
from gossamer.pipeline.tied_weights import TiedWeights
from gossamer.plan.exchange import Calibration, Decision, StepTimes
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.engine import pieces_of, pipeline_of
from gossamer.run.parts import Parts
from gossamer.run.profile_step import pass_seconds
from gossamer.run.rank_stages import RankStages
from gossamer.run.step_algorithm import At, Gradients
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.task import Task
from gossamer.spec.method_config import told
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_seconds
from gossamer.sync import GradientReducer, StepContext, StepVote

_STEPS = 3  # of a trial, after one that warms up
_PASSES = 2  # without messages, between two trials
_TRIALS = 4  # at most
_SHORT_S, _LONG_S, _SHARE = 30.0, 120.0, 0.05  # what all trials may take: so much, and a share of the run in between
_ABOUT = 0.02  # of a step: what steps of a trial differ by at most
RIVAL = 0.1  # of a step: what the forecast of a rival may be off


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice of exchanges that was tried: what its steps took, and the choice with its estimates corrected by that.

    `alone_s`: what a pass without messages took around them; `expected`: what its steps were expected to take;
    `slower`: the factors between the two.
    """

    times: StepTimes
    alone_s: float
    decision: Decision
    expected: StepTimes
    slower: Calibration

    @staticmethod
    def of(decision: Decision, times: StepTimes, alone_s: float) -> Trial:
        """Return the trial of a choice whose steps took `times`, when a pass without messages took `alone_s`."""
        best = decision.best
        slower = Calibration.fit(best.facts, best.picked, times)
        return Trial(times, alone_s, decision.corrected(slower), StepTimes.forecast(best.facts, best.picked), slower)

    def step_s(self, alone_s: float) -> float:
        """Return the seconds of its steps on the machine as it is when a pass without messages takes `alone_s`."""
        return self.times.compute_s * self.until(alone_s).compute + self.times.exposed_s

    def until(self, alone_s: float) -> Calibration:
        """Return how much longer all work takes when a pass without messages takes `alone_s`."""
        slower = alone_s / self.alone_s
        return Calibration(slower, slower)

    def is_of(self, decision: Decision) -> bool:
        """Return whether this choice was tried: the same exchanges in the same buckets."""
        return (decision.written, decision.buckets) == (self.decision.written, self.decision.buckets)

    def show(self) -> str:
        """Return the trial for the user."""
        tried, factors = f"{self.decision.summary}{self.decision.cut}", self.slower.show()
        alone = f"a pass without messages {show_seconds(self.alone_s)}"
        return f"tried {tried}: steps {self.times.show()}, {alone}, expected: {self.expected.show()} ({factors})"


@dataclass(frozen=True, slots=True)
class Trials:
    """The trials before the training of a run of `steps` steps.

    With the passes around them they take 30 s in all, or a twentieth of the run where that is longer, but never more
    than two minutes.
    """

    steps: int
    made: tuple[Trial, ...] = ()

    def and_then(self, one: Trial) -> Trials:
        """Return the trials with one more."""
        return replace(self, made=(*self.made, one))

    def have_time_for(self, decision: Decision) -> bool:
        """Return whether a trial of this choice fits into the time that there is."""
        step_s = decision.best.step_s
        passes_s = 2 * _PASSES * decision.best.facts.compute_s  # those after it, and those before the first trial
        spent_s = sum((_STEPS + 1) * one.times.step_s + _PASSES * one.alone_s for one in self.made)
        may_take_s = min(max(_SHORT_S, _SHARE * self.steps * step_s), _LONG_S)
        return len(self.made) < _TRIALS and spent_s + (_STEPS + 1) * step_s + passes_s <= may_take_s

    @property
    def alone_s(self) -> float:
        """Return what a pass without messages took around most trials: how fast the machine is expected to stay."""
        return median(one.alone_s for one in self.made)

    @property
    def best(self) -> Trial:
        """Return, of the trials whose steps were about as short as the shortest, the one that loses least.

        They are compared at one speed. The shortest as measured would be the one that found the machine fastest.
        """
        near = [one for one in self.made if one.step_s(self.alone_s) <= (1 + _ABOUT) * self._shortest_s]
        return min(near, key=lambda one: one.decision.best.lost)

    def following(self, chosen: Decision, uniform: Sequence[Decision]) -> Decision | None:
        """Return what to try next: the choice after all corrections if that promises a gain, else a `uniform` one.

        All are estimated for the machine as it is around most trials. What is alike for all buckets is forecast with
        the fewest errors, so the first of these that was not tried, in any buckets, is where it might be as fast; one
        that loses more than the best so far where it is forecast as shorter: of many that are alike, noise makes one
        the shortest. None where all have been tried or promise too little, or where there is no time.
        """
        if chosen.best.step_s < (1 - _ABOUT) * self._shortest_s and not any(one.is_of(chosen) for one in self.made):
            return chosen if self.have_time_for(chosen) else None
        tried, best = {told(one.decision.written) for one in self.made}, self.best
        for rival in uniform:
            at_most = 1.0 if rival.best.lost > best.decision.best.lost else 1 + RIVAL
            if rival.best.step_s < at_most * self._shortest_s and told(rival.written) not in tried:
                return rival if self.have_time_for(rival) else None
        return None

    @property
    def _shortest_s(self) -> float:
        return min(one.step_s(self.alone_s) for one in self.made)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSteps:
    """The trial steps of one rank, whose model has a single stage and keeps its parameters whole.

    `feed`: where their batch comes from; `at`: told where this rank is, as in training.
    """

    parts: Parts
    engine: ModelRuntime
    feed: Feed
    pump: CommThread
    at: At

    def alone_s(self, step: int) -> float:
        """Return the seconds of forward and backward of a micro-batch of `step`, without messages, of the slowest rank.

        Nothing is kept of it. All ranks must call it.
        """
        self.at(step, "compute")
        mine = pass_seconds(self.engine, self.feed, trainable(self.engine.module), step, passes=_PASSES)
        return float(gathered(self.pump.channel, [mine]).max())

    def times(self, plan: Plan, step: int) -> StepTimes:
        """Return the median times of a step on the batch of `step` with the exchanges, buckets and turns of `plan`.

        They are as `StepTimes.of_ranks` finds them, as those of training are. All ranks must call it.
        """
        params = trainable(self.engine.module)
        with untouched(self.engine.module, is_timed=True):
            replica = GradientReducer(
                params,
                PlanMethods.of(plan).exchange.by_name(params),
                self.pump,
                bucket_bytes=plan.bucket_bytes,
                buckets=plan.buckets,
                turns=plan.turns,
            )
            try:
                rows = self._rows(replica, step)
            finally:
                replica.close()
        mine = [median(one) for one in zip(*rows, strict=True)]
        return StepTimes.of_ranks(gathered(self.pump.channel, mine).tolist())

    def _rows(self, replica: GradientReducer, step: int) -> Sequence[tuple[float, float, float]]:
        """Return compute_s, exposed_s and encode_s of every step but the first."""
        rank, levels = self.pump.channel.rank, self.pump.channel.levels
        stages = RankStages(
            engine=self.engine,
            pieces=pieces_of(self.parts, self.engine),
            pipeline=pipeline_of(self.parts, rank, levels),
            pump=self.pump,
        )
        pieces = self.feed.fetch(step)
        weights = stages.weights(pieces)
        context = StepContext(step, self.feed.seed, 1.0, sum(weights.values()))
        task = Task(window=context, pieces=pieces, weights=weights)
        gradients = Gradients(
            pieces=stages.pieces,
            pipeline=stages.pipeline,
            tied=TiedWeights(rank, levels),
            pump=self.pump,
            replica=replica,
            at=self.at,
        )
        return [self._row(gradients, task) for _ in range(_STEPS + 1)][1:]

    def _row(self, gradients: Gradients, task: Task) -> tuple[float, float, float]:
        replica, before_s = gradients.replica, self.pump.encoded_s
        replica.timing.begin()
        replica.begin(task.window)
        work = gradients.attempt(task)
        if replica.agree(StepVote(work.loss())).finite:
            replica.commit()  # what an exchange keeps is kept for the next of these steps, as in training
        else:
            replica.reject()
        return work.compute_s, replica.timing.exchanged_s, self.pump.encoded_s - before_s
