"""The progress of a run: records folded into the figures that displays show. Only reads records, without a clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from gossamer.spec.records import Best, End, Evaluation, Event, Length, Proof, Record, Sample, Saved, Start, Step
from gossamer.view.curve import Curve
from gossamer.view.fraction import part_of
from gossamer.view.recent_pace import RecentPace

EVENTS = 50  # kept


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """The checkpoints of a run: the last one that was saved, and the last attempt where that failed."""

    saved: Saved | None = None
    failed: Saved | None = None

    def after(self, save: Saved) -> SaveProgress:
        """Return the state after one more save, which may have failed."""
        return replace(self, failed=save) if save.error else SaveProgress(save)


@dataclass(slots=True)
class RunProgress:
    """The state of a run according to its records so far. `add` is the only way to change it.

    Resuming repeats the steps after the checkpoint: a new start drops the figures that it replaces.
    """

    start: Start | None = None  # with the number of steps that was found since
    step: Step | None = None  # the last committed one
    sample: Sample | None = None
    proof: Proof | None = None  # of this start, where it went well
    end: End | None = None
    saves: SaveProgress = SaveProgress()
    rejected: int = 0
    peak_bytes: int = 0
    losses: Curve = field(default_factory=Curve)  # nats
    evaluations: list[Evaluation] = field(default_factory=list)  # of the first validation set
    other_sets: dict[str, Evaluation] = field(default_factory=dict)  # the last one of every other set
    best: Best | None = None
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))
    pace: RecentPace = field(default_factory=RecentPace)

    def add(self, record: Record) -> None:
        """Fold one record in; unknown kinds change nothing."""
        if isinstance(record, Step):
            self._add_step(record)
        elif isinstance(record, Start):
            self._add_start(record)
        elif isinstance(record, Evaluation):
            self._add_evaluation(record)
        elif isinstance(record, Best):
            self.best = record
        elif isinstance(record, Saved):
            self.saves = self.saves.after(record)
        elif isinstance(record, Length) and self.start is not None:
            self.start = replace(self.start, steps=record.steps)
        elif isinstance(record, Proof):
            self.proof = record if record.is_proved else None
        elif isinstance(record, Sample):
            self.sample = record
        elif isinstance(record, Event):
            self.events.append(record)
        elif isinstance(record, End):
            self.end = record

    def _add_start(self, start: Start) -> None:
        self.start, self.end = start, None
        self.losses.forget_after(start.step)
        self.evaluations = [e for e in self.evaluations if e.step <= start.step]
        self.other_sets = {name: e for name, e in self.other_sets.items() if e.step <= start.step}
        if self.best is not None and self.best.step > start.step:
            self.best = None
        if self.step is not None and self.step.step > start.step:
            self.step = None
        self.pace = RecentPace()

    def _add_evaluation(self, record: Evaluation) -> None:
        if not self.evaluations or self.evaluations[0].name == record.name:
            self.evaluations.append(record)
        else:
            self.other_sets[record.name] = record

    def _add_step(self, step: Step) -> None:
        self.peak_bytes = max(self.peak_bytes, step.peak_bytes)
        if not step.committed:
            self.rejected += 1
            return
        self.step = step
        self.pace.add(step)
        if math.isfinite(step.loss):
            self.losses.add(step.step, step.loss)

    @property
    def steps_done(self) -> int:
        """The last committed step; before the first one, the step that the run started from."""
        if self.step is not None:
            return self.step.step
        return self.start.step if self.start is not None else 0

    @property
    def steps(self) -> int:
        """The number of steps wanted; 0 while no start was read."""
        return self.start.steps if self.start is not None else 0

    @property
    def fraction(self) -> float:
        return min(1.0, self.steps_done / self.steps) if self.steps else 0.0

    @property
    def of_peak(self) -> float | None:
        """The fraction of the measured matmul rate that the model's arithmetic uses (MFU); None where not known."""
        if self.start is None or self.start.peak_flop_per_s <= 0 or self.start.flop_per_token <= 0:
            return None
        rate = self.pace.tokens_per_s
        return part_of(rate * self.start.flop_per_token, self.start.peak_flop_per_s) if rate is not None else None

    @property
    def remaining_s(self) -> float | None:
        """The estimated seconds to the end, at the recent pace including evaluations and checkpoints between steps.

        A time limit ends the run before that: what is left of it is the most.
        """
        left_s = self.pace.seconds_of(max(0, self.steps - self.steps_done))
        if left_s is None or self.start is None or self.start.limit_s == 0:
            return left_s
        return min(left_s, max(0.0, self.start.limit_s - (self.pace.last_end_s - self.start.time_s)))


@dataclass(slots=True)
class Doubtful:
    """Detects impossible fractions (above 100 %), which displays omit, and returns a log message for each kind once."""

    _start: Start | None = None
    _said: set[str] = field(default_factory=set)

    def add(self, record: Record) -> list[str]:
        """Check one record; return the new log messages."""
        if isinstance(record, Start):
            self._start = record
        if not isinstance(record, Step) or self._start is None or record.step_s <= 0:
            return []
        flop_per_s = record.tokens / record.step_s * self._start.flop_per_token
        found: dict[str, str] = {}
        if 0 < self._start.peak_flop_per_s < flop_per_s:
            found["compute"] = (
                f"computed {flop_per_s:.3g} FLOP/s, more than the {self._start.peak_flop_per_s:.3g} FLOP/s "
                "of the fastest matmul measured at the start"
            )
        if record.exposed_s > record.step_s:
            found["wait"] = (
                f"waited {record.exposed_s:.3g} s for communication, longer than the {record.step_s:.3g} s of the step"
            )
        new = {kind: said for kind, said in found.items() if kind not in self._said}
        self._said.update(new)
        return [f"step {record.step} {said}: the display omits fractions above 100%" for said in new.values()]
