"""The trainer: fetch, play, exchange, agree, update, record. No line asks which parallelism is on."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.compress import Exchange
from gossamer.memory import Sharding, States
from gossamer.ops.norm import scale_
from gossamer.optim import Rule
from gossamer.optim.rate import Rate
from gossamer.pipeline.player import play
from gossamer.pipeline.rank import RankWorld
from gossamer.pipeline.tied import Tied
from gossamer.run.batches import Batches, Feed, MicroBatch, moved, part, row_slices
from gossamer.run.forward import Pipeline, run_forward, transfers_of
from gossamer.run.policy import NonFinite, Verdict
from gossamer.run.sampling import Sampler
from gossamer.run.scaling import Scaling
from gossamer.run.stage import Engine, Piece, StepWork
from gossamer.run.verify import Verifier
from gossamer.spec import records
from gossamer.spec.action import Op
from gossamer.spec.errors import Interrupted, StepRejected
from gossamer.sync import Agreement, Apart, Moved, Replica, Sync, Vote, Window
from gossamer.wire.pump import Pump

Sink = Callable[[records.Record], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a run is to do."""

    steps: int
    clip: float
    evaluate_every: int
    evaluate_sequences: int
    checkpoint_every: int
    seed: int


@dataclass(slots=True)
class Progress:
    """What a checkpoint restores, beside tensors: the number of steps behind us, and the policies' counters."""

    step: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Replan:
    """What changes at a step's border: how every parameter's gradient is exchanged from now on."""

    exchange: Mapping[str, Exchange]
    bucket_bytes: int


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One rank's trainer. All parts are built by run.build; this only lets them meet."""

    engine: Engine
    pieces: Mapping[int, Piece]  # the stages of the model that this rank holds
    pipeline: Pipeline
    tied: Tied
    pump: Pump
    sync: Sync
    replica: Replica
    apart: Apart
    rule: Rule
    states: States
    sharding: Sharding
    rate: Rate
    feed: Feed
    validation: Batches | None
    sampler: Sampler | None
    params: Mapping[str, Tensor]
    goal: Goal
    policy: NonFinite
    scaling: Scaling
    verifier: Verifier
    sink: Sink
    at: Callable[[int, str], None]  # tells the supervisor where this rank is: (step, phase)
    save: Callable[[Progress, bool], None]  # the flag: nothing comes after it
    settle: Callable[[], None]  # tells what became of earlier saves
    asked_to_stop: Callable[[], bool]
    replan: Callable[[int], Replan | None]  # asked at every step's border; the same answer on all ranks
    progress: Progress = field(default_factory=Progress)

    def run(self) -> None:
        """Train to the goal. Raises Interrupted after saving when asked to stop, StepRejected by policy,
        Untrustworthy where a rank is found out.
        """
        goal, progress = self.goal, self.progress
        saved = progress.step
        self.verifier.begin(saved, scale=self.scaling.factor)
        while progress.step < goal.steps:
            stop = self.one_step()
            step = progress.step
            if goal.evaluate_every and step % goal.evaluate_every == 0 and step < goal.steps:
                self.evaluate()
            if stop or (goal.checkpoint_every and step % goal.checkpoint_every == 0) or step == goal.steps:
                self.at(step, "save")
                self.apart.settle(step)
                self.verifier.same_everywhere(step)
                self.save(progress, stop or step == goal.steps)
                saved = step
            if stop and step < goal.steps:
                raise Interrupted(f"stopped as asked after step {step}, saved at step {saved}")
        self.evaluate()

    def one_step(self) -> bool:
        """One step, committed or rejected by all ranks together. True when a rank was asked to stop."""
        step, began = self.progress.step, time.perf_counter()
        self.at(step, "fetch")
        pieces = self.feed.fetch(step)
        for piece in pieces.values():
            piece.rows.update(moved(piece.rows, self.engine.device))
        data_s = time.perf_counter() - began
        while True:
            work, agreement = self._attempt(step, pieces)
            verdict = self.policy.judge(agreement, self.scaling)
            if verdict is not Verdict.RETRY:
                break
            self._tell("warning", step, f"{self._why(agreement)}: the step is tried again", agreement)
        lr = self._factor(step)
        if verdict is Verdict.COMMIT:
            self.at(step, "verify")
            self.verifier.check(step, work.loss(), work.weight, scale=work.scale)
            self._update(step, lr, agreement)
        else:
            self.replica.reject()
            self.progress.rejected += 1
            self._tell("error", step, f"{self._why(agreement)}: the step was rejected, no parameter moved", agreement)
        self.progress.step += 1
        self._meet(lr if verdict is Verdict.COMMIT else 0.0, sum(work.weights.values()))
        self._record(step, agreement, verdict, lr, work, time.perf_counter() - began, data_s)
        self.settle()
        if verdict is Verdict.COMMIT and (changed := self.replan(self.progress.step)) is not None:
            exchange = {name: self.sharding.exchange(one) for name, one in changed.exchange.items()}
            self.replica.adopt(exchange, bucket_bytes=changed.bucket_bytes)
        if verdict is Verdict.STOP:
            raise StepRejected(
                f"step {step + 1}: {self._why(agreement)}, {self.policy.in_a_row} rejected steps in a row. "
                "Lower the learning rate, look at the samples named in records.jsonl, or set train.on_nonfinite: skip"
            )
        return agreement.ask > 0

    def _attempt(self, step: int, pieces: Mapping[int, MicroBatch]) -> tuple[StepWork, Agreement]:
        scale, lr = self.scaling.factor, self._factor(step)
        weights = self._weights(pieces)
        mine, together = sum(weights.values()), self.pipeline.together
        window = Window(step, self.goal.seed, lr, mine, scale, together, self.sync.level(step))
        self.replica.timing.exposed_s = 0.0
        self.replica.begin(window)
        work = StepWork(
            pieces=self.pieces,
            stages=self.pipeline.schedule.stages,
            step=step,
            microbatches=pieces,
            weights=weights,
            labels=self.replica.labels if together else lambda: mine,
            scale=scale,
            transfers=transfers_of(self.pump, self.pieces, self.pipeline, pieces, (self.goal.seed, step)),
            recomputed=frozenset((a.stage, a.batch) for a in self.pipeline.row if a.op is Op.RECOMPUTE),
            on_last_backward=self.replica.watch,
            on_reduce=lambda: self._reduce(step),
        )
        self.replica.open(window)
        self.at(step, "compute")
        play(self.pipeline.schedule, RankWorld(self.pipeline.rank, work))
        self.at(step, "agree")
        return work, self.replica.agree(Vote(work.loss(), int(self.asked_to_stop()), work.speaks))

    def _weights(self, pieces: Mapping[int, MicroBatch]) -> dict[int, float]:
        return {number: float(self.engine.objective.weight(piece.rows)) for number, piece in pieces.items()}

    def _reduce(self, step: int) -> None:
        self.at(step, "exchange")
        self.replica.reduce()
        self.tied.add(self.replica.gradients(), self.pump)

    def _update(self, step: int, lr: float, agreement: Agreement) -> None:
        self.at(step, "update")
        clip = self.goal.clip
        if clip and agreement.norm > clip:
            scale_(self.replica.flats(), clip / (agreement.norm + 1e-6))
        self.replica.commit()
        updates = step - self.progress.rejected  # rejected steps moved nothing, and count for no bias correction
        self.states.update(self.replica.gradients(), lr_scale=lr, step=updates)
        began = time.perf_counter()
        self.states.gather(self.replica.layouts, self.pump, key=(self.goal.seed, step))
        self.replica.timing.exposed_s += time.perf_counter() - began
        self.scaling.committed()

    def _meet(self, lr: float, samples: float) -> None:
        """Islands that train apart come together, where it is time."""
        done = self.progress.step
        self.at(done, "meet")
        self.apart.after(Moved(done, lr * self.rule.lr, samples, self.goal.seed, last=done == self.goal.steps))
        self.replica.timing.exposed_s += self.apart.exposed_s  # and what a checkpoint waited for since the last step
        self.apart.exposed_s = 0.0

    def _factor(self, step: int) -> float:
        """What the rule's learning rate is multiplied with in a step."""
        return self.rate.factor(step, self.goal.steps) * self.apart.factor

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean validation loss over the same sequences on any number of ranks; None without validation data. Then what
        the model writes, where that was asked for. Of islands that train apart it is the model they agree on.
        """
        with self.apart.agreed(self.progress.step):
            loss = self._evaluate()
            if self.sampler is not None:
                self.at(self.progress.step, "sample")
                text = self.sampler.text(self.replica.gather)
                self.sink(records.Sample(step=self.progress.step, prompt=self.sampler.prompt, text=text))
        return loss

    def _evaluate(self) -> float | None:
        if self.validation is None or len(self.validation) == 0:
            return None
        began = time.perf_counter()
        self.at(self.progress.step, "evaluate")
        count = min(self.goal.evaluate_sequences, len(self.validation))
        plan, replica = self.feed.plan, self.feed.replica
        mine = np.asarray(part(count, replica, plan.mesh.replica), dtype=np.int64)
        module = self.engine.module
        training = module.training
        module.eval()
        largest = max(1, plan.rows[replica] // plan.microbatches[replica])
        sums = self.replica.gather(self._evaluated(self.validation, [mine[r] for r in row_slices(len(mine), largest)]))
        module.train(training)
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

    def _evaluated(self, split: Batches, chosen: Sequence[np.ndarray[Any, Any]]) -> tuple[float, float]:
        """Sum of the losses over the valid labels of the chosen sequences, and how many labels; zeros on the ranks
        that do not hold the last stage.
        """
        if not chosen:
            return 0.0, 0.0
        pipeline = self.pipeline.forward_only(len(chosen))
        mine = sorted(pipeline.batches)
        batches = {n: MicroBatch(0, moved(split.batch(chosen[n]), self.engine.device)) for n in mine}
        weights = self._weights(batches)
        means = run_forward(self.pump, self.pieces, pipeline, batches)
        known = {n: float(mean) for n, mean in means.items() if weights[n]}
        return sum(mean * weights[n] for n, mean in known.items()), sum(weights[n] for n in known)

    def _record(
        self,
        step: int,
        agreement: Agreement,
        verdict: Verdict,
        lr: float,
        work: StepWork,
        step_s: float,
        data_s: float,
    ) -> None:
        mine = [next(iter(piece.rows.values())) for piece in work.microbatches.values()]
        tokens = sum(t.numel() for t in mine) * self.feed.plan.batch // sum(len(t) for t in mine)
        self.sink(
            records.Step(
                step=step + 1,
                committed=verdict is Verdict.COMMIT,
                loss=agreement.loss,
                weight=agreement.weight,
                tokens=tokens,
                samples=self.feed.samples(step),
                lr=lr * self.rule.lr,
                grad_norm=agreement.norm,
                step_s=step_s,
                compute_s=work.compute_s,
                exposed_s=self.replica.timing.exposed_s,
                wire_bytes=self.replica.sent_bytes(),
                peak_bytes=peak_bytes(),
                data_s=data_s,
            )
        )

    @staticmethod
    def _why(agreement: Agreement) -> str:
        ranks = ", ".join(str(r) for r in agreement.bad_ranks)
        return f"loss {agreement.loss:.4g} and gradient norm {agreement.norm:.4g} are not finite on rank {ranks}"

    def _tell(self, level: str, step: int, message: str, agreement: Agreement) -> None:
        rank = agreement.bad_ranks[0] if agreement.bad_ranks else -1
        first, last = self.feed.samples(step)
        self.sink(
            records.Event(level=level, message=f"{message} (samples {first}..{last - 1})", step=step + 1, rank=rank)
        )


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
