"""The records of steps: of each that was agreed on, and of what went wrong in one."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.optimizer import Optimizer
from gossamer.run.batches import Feed
from gossamer.run.nonfinite_policy import NonFiniteAction
from gossamer.run.resources import peak_bytes
from gossamer.run.step_algorithm import StepAttempt
from gossamer.run.task import Task
from gossamer.run.trainer_services import Sink
from gossamer.spec import records
from gossamer.sync import GradientReducer, StepAgreement


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """A judged step, after its last attempt: what this rank made, what all ranks agreed on, and the verdict."""

    task: Task
    attempt: StepAttempt
    agreement: StepAgreement
    verdict: NonFiniteAction

    @property
    def committed(self) -> bool:
        """Return whether the step updates the parameters."""
        return self.verdict is NonFiniteAction.COMMIT


@dataclass(frozen=True, slots=True)
class Paused:
    """The steps that this rank's island sat out since its last own step, and their seconds."""

    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepReports:
    """The writer of one rank's records about steps."""

    feed: Feed
    rule: Optimizer
    replica: GradientReducer
    sink: Sink
    paused: Paused = field(default_factory=Paused)
    _has_committed: bool = field(default=False, repr=False)  # a step of this process

    def pause(self, seconds: float) -> None:
        """Count a step that this rank's island sat out; the next record includes its seconds."""
        self.paused = Paused(self.paused.steps + 1, self.paused.seconds + seconds)

    def record(self, done: JudgedStep, step_s: float, data_s: float) -> None:
        """Write the record of a step."""
        task, attempt, agreement = done.task, done.attempt, done.agreement
        step = task.window.step
        mine = [next(iter(piece.rows.values())) for piece in task.pieces.values()]
        paused, self.paused = self.paused, Paused()
        first, last = self.feed.samples(step - paused.steps)[0], self.feed.samples(step)[1]
        tokens = sum(t.numel() for t in mine) * (last - first) // sum(len(t) for t in mine)
        self.sink(
            records.Step(
                step=step + 1,
                committed=done.committed,
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
        if done.committed and not self._has_committed:
            self._has_committed = True
            self._tell_idle(step, agreement)

    def _tell_idle(self, step: int, agreement: StepAgreement) -> None:
        """Warn of parameters that a first step leaves as they are: a layer whose adapter the model goes past, say."""
        if not agreement.idle:
            return
        shown = ", ".join(sorted(agreement.idle)[:3]) + (", ..." if len(agreement.idle) > 3 else "")
        self.sink(
            records.Event(
                level="warning",
                message=f"{len(agreement.idle)} of the trained parameters had no gradient in step {step + 1}, and stay "
                f"as they are while that is so: {shown}",
                step=step + 1,
            )
        )

    def tell(self, level: str, step: int, message: str, agreement: StepAgreement) -> None:
        """Write an event about a step's samples, of the first rank that had non-finite numbers."""
        rank = agreement.bad_ranks[0] if agreement.bad_ranks else -1
        first, last = self.feed.samples(step)
        self.sink(
            records.Event(level=level, message=f"{message} (samples {first}..{last - 1})", step=step + 1, rank=rank)
        )
