"""The summary of a run in one dictionary: for the end of a command, for `--json`, and for comparing runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from gossamer.spec.cost import Cost
from gossamer.spec.plan import Plan
from gossamer.spec.records import End, Evaluation, Length, Record, Saved, Start, Step
from gossamer.view.fraction import part_of
from gossamer.view.run_directory import RunDirectory

_TIMES = ("compute_s", "exposed_s", "step_s")  # of Cost; wire_s and bubble_s are not in the records


def summarize(run: RunDirectory) -> dict[str, Any]:
    """Return the run's figures, JSON-ready; an unknown figure is None. Times in seconds, rates over all ranks.

    Steps that a resume repeated count once, with their last values; bytes and seconds count all that was spent.
    `wire_bytes`, `peak_bytes` and the times are those of the rank that wrote the records. `forecast_error` is measured
    / forecast - 1 for every figure of the plan's forecast that the records hold.
    """
    return summary_of(run, run.records(), plan=run.plan())


def summary_of(run: RunDirectory, records: Iterable[Record], *, plan: Plan | None) -> dict[str, Any]:
    """Return the figures of `summarize` from records and a plan that were read already."""
    told = _Told.of(records)
    start, steps = told.start, list(told.steps.values())
    end = told.end if told.end is not None else End(step=max(told.steps, default=0), outcome="unfinished")
    forecast = plan.forecast if plan is not None and plan.forecast != Cost() else None
    measured = _measured(told, steps)
    rate = median(step.tokens / step.step_s for step in steps if step.step_s > 0) if measured.step_s > 0 else None
    evaluation = told.evaluations[max(told.evaluations)] if told.evaluations else None
    stepping_s = sum(step.step_s for step in steps)
    return {
        "run": run.name,
        "directory": str(run.path),
        "outcome": end.outcome,
        "message": end.message,
        "model": _field(start, "model"),
        "parameters": _field(start, "parameters"),
        "ranks": _field(start, "ranks"),
        "exchange": _field(start, "exchange"),
        "steps": end.step,
        "steps_wanted": _field(start, "steps"),
        "rejected_steps": told.rejected,
        "tokens": sum(step.tokens for step in steps),
        "seconds": told.seconds,
        "seconds_since_start": told.since_start_s,
        "starts": told.starts,
        "loss_unit": _field(start, "loss_unit"),
        "final_loss": told.steps[max(told.steps)].loss if told.steps else None,
        "validation_step": _field(evaluation, "step"),
        "validation_loss": _field(evaluation, "loss"),
        "validation_bits_per_byte": _field(evaluation, "bits_per_byte"),
        "tokens_per_s": rate,
        "of_peak": _of_peak(start, rate),
        "exposed_share": part_of(sum(step.exposed_s for step in steps), stepping_s),
        "wire_bytes_per_step": measured.wire_bytes,
        "wire_bytes": told.sent_bytes,
        "peak_bytes": told.peak_bytes or None,
        "checkpoint": _field(told.saved, "path"),
        "checkpoint_step": _field(told.saved, "step"),
        "measured": measured.model_dump(mode="json"),
        "forecast": forecast.model_dump(mode="json") if forecast is not None else None,
        "forecast_error": forecast_error(forecast, measured) if forecast is not None else {},
    }


def _field(record: Record | None, name: str) -> Any:
    """Return a field of a record; None where the run has no such record."""
    return None if record is None else getattr(record, name)


def forecast_error(forecast: Cost, measured: Cost) -> dict[str, float]:
    """Return measured / forecast - 1 for the figures in both: 0.1 for a run that costs 10 % more than its forecast."""
    pairs = {name: (getattr(forecast, name), getattr(measured, name)) for name in _TIMES}
    if forecast.peak_bytes and measured.peak_bytes:
        pairs["peak_bytes"] = (forecast.peak_bytes[0], measured.peak_bytes[0])
    for link, sent in measured.wire_bytes.items():
        if link in forecast.wire_bytes:
            pairs[f"wire_bytes {link}"] = (forecast.wire_bytes[link], sent)
    return {name: was / said - 1 for name, (said, was) in pairs.items() if said > 0 and was > 0}


@dataclass(slots=True)
class _Told:
    """The records sorted by kind; a resume replaces those that it repeats."""

    start: Start | None = None
    end: End | None = None
    saved: Saved | None = None
    steps: dict[int, Step] = field(default_factory=dict)  # committed
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0  # of all starts together
    since_start_s: float = 0.0  # of the last one
    starts: int = 0
    _last_s: float = 0.0

    @staticmethod
    def of(records: Iterable[Record]) -> _Told:
        told = _Told()
        for record in records:
            told.add(record)
        return told

    def add(self, record: Record) -> None:
        if isinstance(record, Start):
            self.start, self.end = record, None
            self.since_start_s, self.starts = 0.0, self.starts + 1
            self.steps = {number: step for number, step in self.steps.items() if number <= record.step}
            self.evaluations = {at: found for at, found in self.evaluations.items() if at <= record.step}
        elif self.start is not None:
            passed_s = max(0.0, record.time_s - self._last_s)
            self.seconds += passed_s
            self.since_start_s += passed_s
        self._last_s = record.time_s
        if isinstance(record, Step):
            self._add_step(record)
        elif isinstance(record, Evaluation):
            self.evaluations[record.step] = record
        elif isinstance(record, Length) and self.start is not None:
            self.start = replace(self.start, steps=record.steps)
        elif isinstance(record, Saved) and not record.error:
            self.saved = record
        elif isinstance(record, End):
            self.end = record

    def _add_step(self, step: Step) -> None:
        self.peak_bytes = max(self.peak_bytes, step.peak_bytes)
        for link, count in step.wire_bytes.items():
            self.sent_bytes[link] = self.sent_bytes.get(link, 0) + count
        if step.committed:
            self.steps[step.step] = step
        else:
            self.rejected += 1


def _measured(told: _Told, steps: list[Step]) -> Cost:
    """Return medians over the steps: the first ones, with cold caches, have little weight."""
    if not steps:
        return Cost()
    links = sorted({link for step in steps for link in step.wire_bytes})
    sent = {link: round(median(step.wire_bytes.get(link, 0) for step in steps)) for link in links}
    return Cost(
        compute_s=median(step.compute_s for step in steps),
        exposed_s=median(step.exposed_s for step in steps),
        step_s=median(step.step_s for step in steps),
        peak_bytes=(told.peak_bytes,),
        sent_bytes=(sum(sent.values()),),
        wire_bytes=sent,
    )


def _of_peak(start: Start | None, tokens_per_s: float | None) -> float | None:
    if start is None or tokens_per_s is None or start.peak_flop_per_s <= 0 or start.flop_per_token <= 0:
        return None
    return part_of(tokens_per_s * start.flop_per_token, start.peak_flop_per_s)
