"""Plain: one aligned line every few seconds, for logs and for terminals that cannot be drawn on."""

from __future__ import annotations

import time
from typing import TextIO

from gossamer.spec.records import End, Evaluation, Event, Proof, Record, Sample, Saved, Start, Step
from gossamer.spec.units import show_bytes, show_gib, show_seconds
from gossamer.view.display import Display
from gossamer.view.format import (
    format_evaluation,
    format_event,
    format_sample,
    model_words,
    saved_words,
    setting_words,
    show_count,
    show_share,
)
from gossamer.view.progress import RunProgress


class Plain(Display):
    """The plain display: steps at most every `every_s` seconds of the run's own time; all other records always."""

    def __init__(self, out: TextIO, *, every_s: float = 5.0) -> None:
        self._out = out
        self._every_s = every_s
        self._progress = RunProgress()
        self._shown_s: float | None = None  # time of the last step line
        self._shown_step = -1
        self._is_waiting = True  # for the first record

    def recall(self, record: Record) -> None:
        self._progress.add(record)

    def show(self, record: Record) -> None:
        self._is_waiting = False
        self._progress.add(record)
        if isinstance(record, Step):
            self._show_step(record)
            return
        if isinstance(record, End) and self._progress.steps_done != self._shown_step:
            self._step_line()
        for word, text in lines_of(record):
            self._line(record.time_s, word, text)
        if isinstance(record, Start):
            self._shown_s = None

    def tick(self) -> None:
        """Say once that the processes start: it may take a minute until they have something to tell."""
        if self._is_waiting:
            self._is_waiting = False
            self._line(time.time(), "starting", "processes, data, model")

    def close(self) -> None:
        pass

    def _show_step(self, step: Step) -> None:
        due = self._shown_s is None or step.time_s - self._shown_s >= self._every_s
        if not step.committed:
            self._line(step.time_s, "rejected", f"step {step.step}: loss {step.loss:g}, gradient {step.grad_norm:g}")
        elif due or step.step == self._progress.steps:
            self._step_line()

    def _step_line(self) -> None:
        step = self._progress.step
        if step is None:
            return
        self._shown_s, self._shown_step = step.time_s, step.step
        self._line(step.time_s, "step", format_step(self._progress, step))

    def _line(self, time_s: float, word: str, text: str) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(time_s))
        self._out.write(f"{clock} {word:<10} {text}\n")
        self._out.flush()


def format_step(progress: RunProgress, step: Step) -> str:
    """Return one step as text in columns of fixed width, with the figures that are known."""
    steps = f"{progress.steps}"
    loss = progress.pace.loss if progress.pace.loss is not None else step.loss
    words = [
        f"{step.step:>{len(steps)}}/{steps}",
        f"loss {loss:7.4f}",
        f"lr {step.lr:.1e}",
        f"grad {step.grad_norm:6.3g}",
    ]
    if (rate := progress.pace.tokens_per_s) is not None:
        words.append(f"{show_count(rate):>5} tok/s")
    if (share := progress.of_peak) is not None:
        words.append(f"{show_share(share):>4} of peak")
    words.append(f"{show_gib(progress.peak_bytes):>8}")
    sent = sum(per_step for per_step, _ in progress.pace.link_bytes.values())
    if sent:
        exposed = progress.pace.exposed_share
        words.append(
            f"sent {show_bytes(sent):>7}" + (f", {show_share(exposed):>4} exposed" if exposed is not None else "")
        )
    if left := progress.remaining_s:
        words.append(f"{show_seconds(left)} left")
    return "  ".join(words)


def lines_of(record: Record) -> list[tuple[str, str]]:
    """Return (word, text) of the lines that a record other than a step is worth."""
    if isinstance(record, Start):
        tokens = f"{record.steps} steps of {show_count(record.tokens_per_step)} tokens"
        verb = "start" if record.step == 0 else "resume"
        again = "" if record.step == 0 else f" from step {record.step}"
        unit = f", loss in {record.loss_unit}" if record.loss_unit else ""
        return [(verb, f"{model_words(record)}{again}"), ("", f"{setting_words(record)}, {tokens}{unit}")]
    if isinstance(record, Evaluation):
        note = f"step {record.step}, {record.sequences} sequences in {show_seconds(record.seconds)}"
        return [("validation", f"{format_evaluation(record)} ({note})")]
    if isinstance(record, Saved):
        return [("checkpoint", saved_words(record) if record.error else f"{saved_words(record)}: {record.path}")]
    if isinstance(record, Sample):
        return [("sample", format_sample(record, 100))]
    if isinstance(record, Proof):  # of others there is a warning, or the run ends with it
        return [("proof", record.message)] if record.is_proved else []
    if isinstance(record, Event):
        return [(record.level, format_event(record))]
    if isinstance(record, End):
        said = f": {record.message}" if record.message else ""
        return [(record.outcome, f"step {record.step} after {show_seconds(record.seconds)}{said}")]
    return []
