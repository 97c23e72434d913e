"""The trainer: fetch, attempt, agree, commit, record. No line asks which parallelism is on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.run.batches import Feed, MicroBatch, moved
from gossamer.run.evaluation import Evaluator
from gossamer.run.goal import Goal, Progress
from gossamer.run.nonfinite_policy import NonFiniteAction
from gossamer.run.nonfinite_steps import NonFiniteSteps, why_rejected
from gossamer.run.outer_steps import OuterSteps
from gossamer.run.step_algorithm import StepAlgorithm
from gossamer.run.step_attempts import StepAttempts
from gossamer.run.step_reports import JudgedStep, StepReports
from gossamer.run.time_limit import TimeLimit
from gossamer.run.trainer_services import FINISH, TrainerServices
from gossamer.run.verify import Verifier
from gossamer.run.watch import Watch
from gossamer.sharding import ShardedOptimizer, Sharding
from gossamer.spec import records
from gossamer.spec.errors import Interrupted, StepRejected
from gossamer.sync import GradientReducer


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Why a run is done before its last step: `reason` as in the end record, and the message for people."""

    reason: str
    message: str


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The trainer of one rank. `run.build` builds all its parts; the trainer only calls them in order."""

    goal: Goal
    feed: Feed
    attempts: StepAttempts
    descent: StepAlgorithm
    nonfinite: NonFiniteSteps
    verifier: Verifier
    outer: OuterSteps
    sharding: Sharding
    evaluator: Evaluator
    limit: TimeLimit
    reports: StepReports
    watch: Watch
    around: TrainerServices

    @property
    def progress(self) -> Progress:
        """Return the steps that are done."""
        return self.around.saver.progress

    @property
    def replica(self) -> GradientReducer:
        """Return the gradient reducer."""
        return self.attempts.replica

    @property
    def states(self) -> ShardedOptimizer:
        """Return the optimizer states, with the parameters."""
        return self.attempts.states

    def begin(self, *, again: bool) -> str:
        """Prepare the first step of this process; return a note for the user, "" for none.

        `again`: the run is resumed, so steps after the checkpoint are replayed from the log if there is one.
        """
        done = self.progress.step
        known = self.descent.begin(done, self.goal.steps if again else done)
        self.progress.step += known.steps
        self.progress.updates += known.steps - known.rejected
        if known.steps:
            self.around.saver.save(self.progress, last=self.progress.step == self.goal.steps)
        self.outer.apart.begin(self.progress.step, self.goal.steps, self.goal.seed)
        return known.told

    def run(self) -> EarlyEnd | None:
        """Train to the goal; return why the run is done before it, None where it is not.

        Raises Interrupted, after saving, when asked to stop; StepRejected by the policy for non-finite steps;
        Untrustworthy if verification names a rank.
        """
        progress, began = self.progress, time.perf_counter()
        first = saved = progress.step
        if self.watch.is_over:  # resumed as it ended, and nothing has changed about that
            return self._early_end(progress.step)
        self.verifier.begin(saved, scale=self.nonfinite.scaling.factor)
        while progress.step < self.goal.steps:
            stop = self.one_step()
            step = progress.step
            self.goal = self.limit.fit(self.goal, step, step - first, time.perf_counter() - began)
            goal, is_best = self.goal, self._evaluate(step)
            ends = bool(stop) or self.watch.is_over or step == goal.steps
            if ends or is_best or (goal.checkpoint_every and step % goal.checkpoint_every == 0):
                self._save(step, last=ends or is_best)
                saved = step
            if step < goal.steps and (stop == FINISH or self.watch.is_over):
                return self._early_end(step)
            if stop and step < goal.steps:
                raise Interrupted(f"stopped as asked after step {step}, saved at step {saved}")
        if not self.watch.is_on or first == progress.step:
            self.evaluator.evaluate(progress.step)
        return None

    def _evaluate(self, step: int) -> bool:
        """Evaluate after `step` steps where that is due; return whether it is the best so far.

        A run that keeps its best checkpoint evaluates its last step before it is saved: that may be the best one.
        """
        goal = self.goal
        is_last, is_due = step == goal.steps, goal.evaluate_every and step % goal.evaluate_every == 0
        if not (self.watch.is_on if is_last else is_due):
            return False
        figures = self.evaluator.evaluate(step)
        self.around.saver.settle_best(self.replica.gather, self.around.at)
        if not self.watch.see(step, figures):
            return False
        assert self.watch.best is not None
        figure, value = self.watch.best.figure, self.watch.best.best.value
        self.around.sink(records.Best(step=step, name=figure.of, figure=figure.figure, value=value))
        return True

    def _early_end(self, step: int) -> EarlyEnd:
        """Return why the run ends after `step` steps, show it as complete, and load what the islands agree on."""
        if self.outer.apart.fragments:
            with self.outer.apart.agreed(step):
                agreed = {name: param.detach().clone() for name, param in self.states.params.items()}
            for name, value in agreed.items():
                self.states.params[name].detach().copy_(value)
        self.around.sink(records.Length(step=step, steps=step))
        if self.watch.stop is not None and self.watch.is_over:
            return EarlyEnd("early_stop", self.watch.stop.reason)
        return EarlyEnd("callback", f"a callback ended the run after step {step}")

    def _save(self, step: int, *, last: bool) -> None:
        """Save a checkpoint after `step` steps; `last`: also if that must wait for the checkpoint before."""
        if self.watch.best is not None and self.watch.best.best.step != step:
            self.around.saver.settle_best(self.replica.gather, self.around.at)
        self.around.at(step, "save")
        self.outer.apart.settle(step)
        self.verifier.same_everywhere(step)
        self.descent.settle(step)
        if last:
            self.around.saver.wait_for_writes(self.replica.gather, self.around.at)
        self.around.saver.save(self.progress, last=last)

    def one_step(self) -> int:
        """Run one step, which all ranks, or those of one island, commit or reject together.

        Returns the request to stop that all ranks follow after it, 0 for none.
        """
        step, began = self.progress.step, time.perf_counter()
        if not self.feed.makes(step) or self.outer.apart.is_late(step):
            return self._pause(began)
        pieces = self._fetch(step)
        data_s = time.perf_counter() - began
        done = self._judged(step, pieces)
        stops = done.verdict is NonFiniteAction.STOP
        advice = self._advice(done) if stops else ""
        self._finish(done)
        self.progress.step += 1
        window, agreement = done.task.window, done.agreement
        self.outer.note(agreement, window.level, committed=done.committed)
        lr, samples = (window.lr, window.weight) if done.committed else (0.0, 0.0)
        self.outer.after(self.goal, self.progress.step, lr, samples)
        stop = self.outer.stops(self.goal, self.progress.step, agreement.ask)
        self.reports.record(done, time.perf_counter() - began, data_s)
        self.around.saver.report()
        if done.committed:
            self._replan(done.attempt.compute_s)
        if stops:
            raise StepRejected(self.nonfinite.error(step, agreement, advice))
        return stop

    def _fetch(self, step: int) -> dict[int, MicroBatch]:
        """Return this rank's micro-batches of a step, on its device."""
        self.around.at(step, "fetch")
        pieces = self.feed.fetch(step)
        for piece in pieces.values():
            piece.rows.update(moved(piece.rows, self.attempts.stages.engine.device))
        return pieces

    def _judged(self, step: int, pieces: Mapping[int, MicroBatch]) -> JudgedStep:
        """Attempt the step until it is to be committed or rejected."""
        while True:
            task, attempt, agreement = self.attempts.attempt(step, pieces, self.goal)
            verdict = self.nonfinite.judge(agreement)
            if verdict is not NonFiniteAction.COMMIT and (said := self.attempts.undo()):
                self.reports.tell("warning", step, said, agreement)
            if verdict is not NonFiniteAction.RETRY:
                return JudgedStep(task, attempt, agreement, verdict)
            said = f"{why_rejected(agreement)}: the step is tried again"
            self.reports.tell("warning", step, said, agreement)

    def _advice(self, done: JudgedStep) -> str:
        """Return advice about a step that stops the run."""
        step, pieces = done.task.window.step, done.task.pieces

        def again() -> None:
            self.attempts.attempt(step, pieces, self.goal)
            self.attempts.undo()

        return self.nonfinite.advice(done.task, done.agreement, updates=self.progress.updates, again=again)

    def _finish(self, done: JudgedStep) -> None:
        """Commit or reject a step."""
        task, step = done.task, done.task.window.step
        if done.committed:
            self.around.at(step, "verify")
            self.verifier.check(step, done.attempt.vote.loss, task.window.weight, scale=task.window.scale)
            self.around.at(step, "update")  # rejected steps moved nothing, and count for no bias correction
            self.descent.commit(task, done.agreement, updates=self.progress.updates)
            self.progress.updates += 1
            self.nonfinite.scaling.committed()
        else:
            self.descent.reject(task)
            said = f"{why_rejected(done.agreement)}: the step was rejected, no parameter moved"
            self.reports.tell("error", step, said, done.agreement)

    def _replan(self, compute_s: float) -> None:
        """Change the exchanges between two steps, if the planner has other ones."""
        changed = self.around.replan(self.progress.step, compute_s, self.replica.timing.exchanged_s)
        if changed is None:
            return
        path = self.states.deal.path
        exchange = {name: self.sharding.exchange(one, path) for name, one in changed.exchange.items()}
        self.replica.adopt(exchange, bucket_bytes=changed.bucket_bytes, buckets=changed.buckets, turns=changed.turns)

    def _pause(self, began: float) -> int:
        """Sit out a step that this island has no time for, but take part in the rounds of the outer loop."""
        self.progress.step += 1
        self.outer.after(self.goal, self.progress.step, 0.0, 0.0, made=False)
        stop = self.outer.stops(self.goal, self.progress.step)
        self.around.saver.report()
        self.reports.pause(time.perf_counter() - began)
        return stop
