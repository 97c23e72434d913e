"""The progress of a run: records folded into the figures that displays show. Only reads records, without a clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gossamer.spec.records import End, Evaluation, Event, Length, Proof, Record, Sample, Saved, Start, Step
from gossamer.view.curve import Curve

RECENT = 20  # steps that a rate is taken over
SMOOTH = 5  # steps that the loss is averaged over
EVENTS = 50  # kept


@dataclass(slots=True)
class RunProgress:
    """The state of a run according to its records so far. `add` is the only way to change it.

    Resuming repeats the steps after the checkpoint: a new start drops the figures that it replaces.
    """

    start: Start | None = None
    length: Length | None = None  # since the last start
    step: Step | None = None  # the last committed one
    evaluation: Evaluation | None = None
    saved: Saved | None = None  # the last one that succeeded
    save_failed: Saved | None = None  # the last one, where that failed
    sample: Sample | None = None
    proof: Proof | None = None  # of this start, where it went well
    end: End | None = None
    rejected: int = 0
    exposed_s: float = 0.0
    stepping_s: float = 0.0
    sent_bytes: dict[str, int] = field(default_factory=dict)  # by link, since the last start
    peak_bytes: int = 0
    losses: Curve = field(default_factory=Curve)  # nats
    evaluations: list[Evaluation] = field(default_factory=list)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))
    _recent: deque[Step] = field(default_factory=lambda: deque(maxlen=RECENT))
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=5 * RECENT))

    def add(self, record: Record) -> None:
        """Fold one record in; unknown kinds change nothing."""
        if isinstance(record, Step):
            self._add_step(record)
        elif isinstance(record, Start):
            self._add_start(record)
        elif isinstance(record, Evaluation):
            self.evaluation = record
            self.evaluations.append(record)
        elif isinstance(record, Saved):
            self._add_saved(record)
        elif isinstance(record, Length):
            self.length = record
        elif isinstance(record, Proof):
            self.proof = record if record.is_proved else None
        elif isinstance(record, Sample):
            self.sample = record
        elif isinstance(record, Event):
            self.events.append(record)
        elif isinstance(record, End):
            self.end = record

    def _add_saved(self, saved: Saved) -> None:
        if saved.error:
            self.save_failed = saved
        else:
            self.saved, self.save_failed = saved, None

    def _add_start(self, start: Start) -> None:
        self.start, self.length, self.end = start, None, None
        self.losses.forget_after(start.step)
        self.evaluations = [e for e in self.evaluations if e.step <= start.step]
        self.evaluation = self.evaluations[-1] if self.evaluations else None
        if self.step is not None and self.step.step > start.step:
            self.step = None
        self._recent.clear()
        self._ends.clear()
        self.sent_bytes = {}
        self.exposed_s = self.stepping_s = 0.0

    def _add_step(self, step: Step) -> None:
        for link, count in step.wire_bytes.items():
            self.sent_bytes[link] = self.sent_bytes.get(link, 0) + count
        self.peak_bytes = max(self.peak_bytes, step.peak_bytes)
        if not step.committed:
            self.rejected += 1
            return
        self.step = step
        self._recent.append(step)
        self._ends.append(step.time_s)
        self.exposed_s += step.exposed_s
        self.stepping_s += step.step_s
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
        if self.length is not None:
            return self.length.steps
        return self.start.steps if self.start is not None else 0

    @property
    def fraction(self) -> float:
        return min(1.0, self.steps_done / self.steps) if self.steps else 0.0

    @property
    def loss(self) -> float | None:
        """The mean loss of the last few steps in nats per token; single steps are noisy."""
        losses = [step.loss for step in list(self._recent)[-SMOOTH:] if math.isfinite(step.loss)]
        return sum(losses) / len(losses) if losses else None

    @property
    def step_s(self) -> float | None:
        """The median duration of the recent steps in seconds."""
        return median(step.step_s for step in self._recent) if self._recent else None

    @property
    def tokens_per_s(self) -> float | None:
        """The throughput of all ranks together in tokens/s, the median of the recent steps."""
        rates = [step.tokens / step.step_s for step in self._recent if step.step_s > 0]
        return median(rates) if rates else None

    @property
    def of_peak(self) -> float | None:
        """The fraction of the measured matmul rate that the model's arithmetic uses (MFU); None where not known."""
        if self.start is None or self.start.peak_flop_per_s <= 0 or self.start.flop_per_token <= 0:
            return None
        rate = self.tokens_per_s
        return part_of(rate * self.start.flop_per_token, self.start.peak_flop_per_s) if rate is not None else None

    @property
    def exposed_share(self) -> float | None:
        """The fraction of the recent step time that is exposed communication."""
        stepping_s = sum(step.step_s for step in self._recent)
        return part_of(sum(step.exposed_s for step in self._recent), stepping_s)

    @property
    def link_bytes(self) -> dict[str, tuple[float, float]]:
        """By link: bytes per step that the recording rank sends, and bytes per second over the recent steps."""
        steps, stepping_s = len(self._recent), sum(step.step_s for step in self._recent)
        if not steps or stepping_s <= 0:
            return {}
        links = sorted({link for step in self._recent for link in step.wire_bytes})
        sums = {link: sum(step.wire_bytes.get(link, 0) for step in self._recent) for link in links}
        return {link: (count / steps, count / stepping_s) for link, count in sums.items()}

    @property
    def remaining_s(self) -> float | None:
        """The estimated seconds to the end, at the recent pace including evaluations and checkpoints between steps.

        A time limit ends the run before that: what is left of it is the most.
        """
        if len(self._ends) < 2:
            return None
        pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        left_s = max(0, self.steps - self.steps_done) * pace_s
        if self.start is None or self.start.limit_s == 0:
            return left_s
        return min(left_s, max(0.0, self.start.limit_s - (self._ends[-1] - self.start.time_s)))


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
        found = []
        if 0 < self._start.peak_flop_per_s < flop_per_s:
            found.append("makes more arithmetic than the fastest matmul that was measured at the start")
        if record.exposed_s > record.step_s:
            found.append("has waited longer for the wire than it took")
        new = [said for said in found if said not in self._said]
        self._said.update(new)
        return [f"step {record.step} {said}: shares beyond 100% are not shown" for said in new]


def part_of(part: float, whole: float) -> float | None:
    """Return `part` as a fraction of `whole`; None where the whole is unknown, or the part is larger.

    In the latter case one of them was measured wrongly, and no figure is better than an impossible one.
    """
    return part / whole if 0 <= part <= whole and whole > 0 else None
