"""The trainer: fetch, attempt, agree, commit, record. No line asks which parallelism is on."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommThread
from gossamer.model.side_effects import untouched
from gossamer.optimizer import Optimizer
from gossamer.optimizer.lr_schedule import LRSchedule
from gossamer.run.batches import Batches, Feed, MicroBatch, moved, part, row_slices
from gossamer.run.forward import Pipeline, run_forward
from gossamer.run.goal import Goal, Progress
from gossamer.run.loss_scale import LossScale
from gossamer.run.nonfinite_cause import NonFiniteSite, Ranks, cause_of
from gossamer.run.nonfinite_policy import NonFiniteAction, NonFinitePolicy
from gossamer.run.step_algorithm import At, StepAlgorithm, StepAttempt, Task
from gossamer.run.step_runner import ModelPart, ModelRuntime
from gossamer.run.surroundings import Replan, Sink
from gossamer.run.text_sampling import NoSample, Sampler
from gossamer.run.verify import Verifier
from gossamer.sharding import ShardedOptimizer, Sharding
from gossamer.spec import records
from gossamer.spec.errors import BadInput, Interrupted, StepRejected
from gossamer.sync import (
    GradientReducer,
    LocalStep,
    OuterLoop,
    ReplicaStatus,
    StatusChannel,
    StepAgreement,
    StepContext,
    Sync,
)

_FIRST_STEPS, _FIT_EVERY = 10, 25  # before the pace is first measured; between measurements


@dataclass(frozen=True, slots=True)
class Paused:
    """The steps that this rank's island sat out since its last own step, and their seconds."""

    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The trainer of one rank. `run.build` builds all its parts; the trainer only calls them in order."""

    engine: ModelRuntime
    pieces: Mapping[int, ModelPart]  # the stages of the model that this rank holds
    pipeline: Pipeline
    pump: CommThread
    sync: Sync
    replica: GradientReducer
    descent: StepAlgorithm
    apart: OuterLoop
    word: StatusChannel | None  # between islands in local-update training
    rule: Optimizer
    states: ShardedOptimizer
    sharding: Sharding
    rate: LRSchedule
    feed: Feed
    validation: Batches | None
    sampler: Sampler | None
    params: Mapping[str, Tensor]
    goal: Goal
    policy: NonFinitePolicy
    scaling: LossScale
    verifier: Verifier
    sink: Sink
    at: At  # reports this rank's position to the supervisor: (step, phase)
    save: Callable[[Progress, bool], None]  # the flag: this is the last save
    settle: Callable[[], None]  # reports the results of earlier saves
    asked_to_stop: Callable[[], bool]
    replan: Callable[[int], Replan | None]  # asked between steps; the same answer on all ranks
    progress: Progress = field(default_factory=Progress)
    paused: Paused = field(default_factory=Paused)
    most_steps: int = 0  # the configured steps, if the time limit has lowered them

    def begin(self, *, again: bool) -> str:
        """Prepare the first step of this process; return a note for the user, "" for none.

        `again`: the run is resumed, so steps after the checkpoint are replayed from the log if there is one.
        """
        done = self.progress.step
        known = self.descent.begin(done, self.goal.steps if again else done)
        self.progress.step += known.steps
        self.progress.updates += known.steps - known.rejected
        if known.steps:
            self.save(self.progress, self.progress.step == self.goal.steps)
        self.apart.begin(self.progress.step, self.goal.steps, self.goal.seed)
        return known.told

    def run(self) -> None:
        """Train to the goal.

        Raises Interrupted, after saving, when asked to stop; StepRejected by the policy for non-finite steps;
        Untrustworthy if verification names a rank.
        """
        progress, began = self.progress, time.perf_counter()
        first = saved = progress.step
        self.verifier.begin(saved, scale=self.scaling.factor)
        while progress.step < self.goal.steps:
            stop = self.one_step()
            step = progress.step
            self._fit(step - first, time.perf_counter() - began)
            goal = self.goal
            if goal.evaluate_every and step % goal.evaluate_every == 0 and step < goal.steps:
                self.evaluate()
            if stop or (goal.checkpoint_every and step % goal.checkpoint_every == 0) or step == goal.steps:
                self.at(step, "save")
                self.apart.settle(step)
                self.verifier.same_everywhere(step)
                self.descent.settle(step)
                self.save(progress, stop or step == goal.steps)
                saved = step
            if stop and step < goal.steps:
                raise Interrupted(f"stopped as asked after step {step}, saved at step {saved}")
        self.evaluate()

    def _fit(self, made: int, spent_s: float) -> None:
        """Set the number of steps that fit in the run's seconds at the pace so far; the same on all ranks.

        The learning-rate schedule follows the new number of steps.
        """
        goal, done = self.goal, self.progress.step
        if not goal.seconds or done == goal.steps or (made != _FIRST_STEPS and made % _FIT_EVERY):
            return
        pace_s = spent_s / made
        left_s = goal.seconds - spent_s - self._last_evaluation_s(pace_s)
        fitting = int(self.replica.gather((done + max(0.0, left_s / pace_s),)).min())
        steps = max(done, min(fitting, self.most_steps or goal.steps))
        self.most_steps = self.most_steps or goal.steps
        try:
            self.rate.factor(done, steps)
        except BadInput:  # a warm-up of so many steps, which is longer: the run is cut off where its time is over
            steps = goal.steps if left_s > 0 else done
        if abs(steps - goal.steps) <= goal.steps // 100 and steps != done:
            return
        self.goal = replace(goal, steps=steps)
        self.sink(records.Length(step=done, steps=steps))
        said = f"{pace_s:.3g} s per step: {goal.seconds:.3g} s are enough for {steps} of {self.most_steps} steps"
        self.sink(records.Event(level="info", message=said, step=done))

    def _last_evaluation_s(self, pace_s: float) -> float:
        """Return an estimate of the last evaluation's seconds: a forward takes a third of a step."""
        if self.validation is None:
            return 0.0
        sequences = min(self.goal.evaluate_sequences, len(self.validation))
        return pace_s * sequences / sum(self.feed.plan.rows) / 3

    def one_step(self) -> bool:
        """Run one step, which all ranks, or those of one island, commit or reject together.

        Returns True when all ranks are to stop after it.
        """
        step, began = self.progress.step, time.perf_counter()
        if not self.feed.makes(step) or self.apart.is_late(step):
            return self._pause(began)
        self.at(step, "fetch")
        pieces = self.feed.fetch(step)
        for piece in pieces.values():
            piece.rows.update(moved(piece.rows, self.engine.device))
        data_s = time.perf_counter() - began
        while True:
            task, attempt, agreement = self._attempt(step, pieces)
            verdict = self.policy.judge(agreement, self.scaling)
            if verdict is not NonFiniteAction.RETRY:
                break
            self._tell("warning", step, f"{self._why(agreement)}: the step is tried again", agreement)
        advice = self._advice(task, agreement) if verdict is NonFiniteAction.STOP else ""
        if verdict is NonFiniteAction.COMMIT:
            self.at(step, "verify")
            self.verifier.check(step, attempt.vote.loss, task.window.weight, scale=task.window.scale)
            self.at(step, "update")  # rejected steps moved nothing, and count for no bias correction
            self.descent.commit(task, agreement, updates=self.progress.updates)
            self.progress.updates += 1
            self.scaling.committed()
        else:
            self.descent.reject(task)
            self._tell("error", step, f"{self._why(agreement)}: the step was rejected, no parameter moved", agreement)
        self.progress.step += 1
        committed = verdict is NonFiniteAction.COMMIT
        if self.word is not None and task.window.level != "all":
            self.word.note(agreement.loss, agreement.weight, committed=committed)
        self._meet(task.window.lr if committed else 0.0, task.window.weight if committed else 0.0)
        stop = self._stops(agreement.ask)
        self._record(task, attempt, agreement, verdict, time.perf_counter() - began, data_s)
        self.settle()
        if verdict is NonFiniteAction.COMMIT and (changed := self.replan(self.progress.step)) is not None:
            path = self.states.deal.path
            exchange = {name: self.sharding.exchange(one, path) for name, one in changed.exchange.items()}
            self.replica.adopt(exchange, bucket_bytes=changed.bucket_bytes)
        if verdict is NonFiniteAction.STOP:
            raise StepRejected(
                f"step {step + 1}: {self._why(agreement)}, {self.policy.in_a_row} rejected steps in a row. {advice}, "
                "or set train.on_nonfinite: skip"
            )
        return stop

    def _advice(self, task: Task, agreement: StepAgreement) -> str:
        """Return advice about non-finite steps.

        If no update was made before, the step runs once more to find the cause, on all ranks that agreed on it.
        """
        if self.progress.updates:
            return "Lower the learning rate, look at the samples named in records.jsonl"
        window, sight = task.window, NonFiniteSite(self.engine.module)
        with sight.watching():
            self._attempt(window.step, task.pieces)
        level = "" if window.level == "all" else window.level
        levels = self.replica.levels
        ranks = Ranks(
            gather=lambda row: self.replica.gather(row, level),
            numbers=levels.group(level, self.replica.rank) if level else levels.everyone,
            bad=agreement.bad_ranks,
        )
        rows = [piece.rows for piece in task.pieces.values()]
        cause = cause_of(sight, min(self.pieces, default=0), rows, self.replica.gradients(), ranks)
        said = f"No update was made before, so it is not the learning rate: {cause.told(agreement.loss)}"
        return f"{said}. The samples are named in records.jsonl; leave them out"

    def _pause(self, began: float) -> bool:
        """Sit out a step that this island has no time for, but take part in the rounds of the outer loop."""
        self.progress.step += 1
        self._meet(0.0, 0.0, made=False)
        stop = self._stops()
        self.settle()
        self.paused = Paused(self.paused.steps + 1, self.paused.seconds + time.perf_counter() - began)
        return stop

    def _attempt(self, step: int, pieces: Mapping[int, MicroBatch]) -> tuple[Task, StepAttempt, StepAgreement]:
        self.states.release()  # reshard what an evaluation has gathered: every step gathers the same
        weights = self._weights(pieces)
        together, level = self.pipeline.together, self.sync.level(step)
        mine, scale = sum(weights.values()), self.scaling.factor
        window = StepContext(step, self.goal.seed, self._factor(step), mine, scale, together, level)
        self.replica.timing.exposed_s = 0.0
        self.replica.begin(window)
        task = Task(window=window, pieces=pieces, weights=weights)
        attempt = self.descent.attempt(task)
        self.replica.timing.exposed_s += self.states.waited_s()
        self.at(step, "agree")
        return task, attempt, self.replica.agree(replace(attempt.vote, ask=int(self.asked_to_stop())))

    def _weights(self, pieces: Mapping[int, MicroBatch]) -> dict[int, float]:
        return {number: float(self.engine.objective.weight(piece.rows)) for number, piece in pieces.items()}

    def _meet(self, lr: float, samples: float, *, made: bool = True) -> None:
        """Apply and start rounds of the outer loop that are due after this step."""
        done, last = self.progress.step, self.progress.step == self.goal.steps
        self.at(done, "meet")
        moved = LocalStep(done, lr * self.rule.lr, samples, self.goal.seed, last=last, made=made)
        for landed in self.apart.after(moved):
            self.states.meet(landed.moved, rates=landed.rates)
            self.states.learn(landed.squares)
        self.replica.timing.exposed_s += self.apart.exposed_s  # including the wait for a checkpoint since the last step
        self.apart.exposed_s = 0.0

    def _stops(self, ask: int = 0) -> bool:
        """Return whether all ranks stop now.

        If all ranks voted on the step, one vote `ask` is enough; else they stop when all have received the request.
        """
        done = self.progress.step
        if self.word is None or self.sync.level(done - 1) == "all":
            return ask > 0
        began = time.perf_counter()
        heard = self.word.after(done, int(self.asked_to_stop()), last=done == self.goal.steps)
        self.replica.timing.exposed_s += time.perf_counter() - began
        for one in heard:
            self._tell_of_islands(one)
        return any(one.ask for one in heard)

    def _tell_of_islands(self, heard: ReplicaStatus) -> None:
        losses = tuple(s / w if w else math.nan for s, w in zip(heard.losses, heard.weights, strict=True))
        self.sink(records.Islands(step=heard.step, losses=losses, weights=heard.weights, rejected=heard.rejected))
        islands = self.replica.levels.groups["island"]
        for island in (one for one, is_late in zip(islands, heard.late, strict=True) if is_late):
            said = f"the island of ranks {list(island)} was late: the round went on without what it has done in it"
            self.sink(records.Event(level="warning", message=said, step=heard.step, rank=island[0]))
        for island, count in zip(islands, heard.rejected, strict=True):
            if count and self.replica.rank not in island:
                said = f"the island of ranks {list(island)} has rejected {count} of its last steps: not finite"
                self.sink(records.Event(level="error", message=said, step=heard.step, rank=island[0]))

    def _factor(self, step: int) -> float:
        """Return the factor on the optimizer's learning rate in a step."""
        return self.rate.factor(step, self.goal.steps) * self.apart.factor

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Return the mean validation loss, over the same sequences on any number of ranks; None without such data.

        In local-update training it is the loss of the global parameters. It also samples text if the configuration asks
        for that. The buffers of the model are afterwards as training left them.
        """
        module, is_whole = self.engine.module, not self.sharding.takes_parameters
        with self.apart.agreed(self.progress.step), untouched(module, parameters=is_whole):
            loss = self._evaluate()
            if self.sampler is not None:
                self.at(self.progress.step, "sample")
                try:
                    text = self.sampler.text(self.replica.gather)
                    self.sink(records.Sample(step=self.progress.step, prompt=self.sampler.prompt, text=text))
                except NoSample as error:
                    said = f"no sample: {error}"
                    self.sink(records.Event(level="warning", message=said, step=self.progress.step))
        return loss

    def _evaluate(self) -> float | None:
        if self.validation is None or len(self.validation) == 0:
            return None
        began = time.perf_counter()
        self.at(self.progress.step, "evaluate")
        count = min(self.goal.evaluate_sequences, len(self.validation))
        plan, replica = self.feed.plan, self.feed.replica
        slices = [list(self._slices(count, r)) for r in range(plan.mesh.replica)]
        self.engine.module.eval()
        # With sharded parameters all ranks run equally many forwards; those beyond a rank's share count nothing.
        idle = max(map(len, slices)) - len(slices[replica]) if self.sharding.takes_parameters else 0
        sums = self.replica.gather(self._evaluated(self.validation, slices[replica], idle))
        sums = sums.sum(0)
        loss = float(sums[0] / sums[1]) if sums[1] else math.nan
        text_bytes = self.validation.text_bytes(np.arange(count))
        self.sink(
            records.Evaluation(
                step=self.progress.step,
                loss=loss,
                bits_per_byte=float(sums[0]) / math.log(2) / text_bytes if text_bytes else None,
                sequences=count,
                seconds=time.perf_counter() - began,
            )
        )
        return loss

    def _slices(self, count: int, replica: int) -> Iterator[np.ndarray[Any, Any]]:
        """Return the sequences that a replica evaluates, of `count` in all, in slices as long as its micro-batches."""
        plan = self.feed.plan
        mine = np.asarray(part(count, replica, plan.mesh.replica), dtype=np.int64)
        largest = max(1, plan.rows[replica] // plan.microbatches[replica])
        return (mine[rows] for rows in row_slices(len(mine), largest))

    def _evaluated(self, split: Batches, chosen: Sequence[np.ndarray[Any, Any]], idle: int) -> tuple[float, float]:
        """Return the sum of the losses over the valid labels of the chosen sequences, and the number of these labels.

        Both are zero on ranks without the last stage. `idle`: extra forwards to run, so that all ranks unshard equally
        often.
        """
        real = len(chosen)
        chosen = [*chosen, *[np.zeros(1, np.int64)] * idle]
        if not chosen:
            return 0.0, 0.0
        pipeline = self.pipeline.forward_only(len(chosen))
        mine = sorted(pipeline.batches)
        batches: dict[int, MicroBatch] = {}
        for n in mine:
            self.at(self.progress.step, "evaluate")
            batches[n] = MicroBatch(0, moved(split.batch(chosen[n]), self.engine.device))
        weights = self._weights(batches)
        means = run_forward(
            self.pump, self.pieces, pipeline, batches, moves=lambda: self.at(self.progress.step, "evaluate")
        )
        known = {n: float(mean) for n, mean in means.items() if weights[n] and n < real}
        return sum(mean * weights[n] for n, mean in known.items()), sum(weights[n] for n in known)

    def _record(
        self,
        task: Task,
        attempt: StepAttempt,
        agreement: StepAgreement,
        verdict: NonFiniteAction,
        step_s: float,
        data_s: float,
    ) -> None:
        step = task.window.step
        mine = [next(iter(piece.rows.values())) for piece in task.pieces.values()]
        paused, self.paused = self.paused, Paused()
        first, last = self.feed.samples(step - paused.steps)[0], self.feed.samples(step)[1]
        tokens = sum(t.numel() for t in mine) * (last - first) // sum(len(t) for t in mine)
        self.sink(
            records.Step(
                step=step + 1,
                committed=verdict is NonFiniteAction.COMMIT,
                loss=agreement.loss,
                weight=agreement.weight,
                tokens=tokens,
                samples=(first, last),
                lr=task.window.lr * self.rule.lr,
                grad_norm=agreement.norm,
                step_s=step_s + paused.seconds,
                compute_s=attempt.compute_s,
                exposed_s=self.replica.timing.exposed_s,
                wire_bytes=self.replica.sent_bytes(),
                peak_bytes=peak_bytes(),
                data_s=data_s,
            )
        )

    @staticmethod
    def _why(agreement: StepAgreement) -> str:
        ranks = ", ".join(str(r) for r in agreement.bad_ranks)
        return f"loss {agreement.loss:.4g} and gradient norm {agreement.norm:.4g} are not finite on rank {ranks}"

    def _tell(self, level: str, step: int, message: str, agreement: StepAgreement) -> None:
        rank = agreement.bad_ranks[0] if agreement.bad_ranks else -1
        first, last = self.feed.samples(step)
        self.sink(
            records.Event(level=level, message=f"{message} (samples {first}..{last - 1})", step=step + 1, rank=rank)
        )


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
