"""Runs side by side: whether they can be compared, what differs between them, and their figures at a common point."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from gossamer.spec.errors import bad_input
from gossamer.spec.records import Evaluation, Step
from gossamer.view.fraction import part_of
from gossamer.view.run_history import RunHistory, dotted, written
from gossamer.view.text_chart import LETTERS, Line

_RECENT = 5  # steps of which a loss is the mean, as in the live display
_CURVE_POINTS = 200  # of a curve for programs
_ABOUT_THE_FOLDER = ("run.name", "run.directory", "run.display", "run.trackers")
_KEYS_DIFFER = ("configuration", "plan")  # elsewhere a missing key is an earlier version that did not write it
_LONG = ("reasons", "forecast", "units", "buckets", "turns", "links", "format")  # of a plan: told elsewhere, or long


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that is not the same in all runs: where it is from, its key, and one text per run ("-": not there)."""

    section: str
    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of each run at the common point; None where it is not known. `unit` is "" for a plain number."""

    name: str
    unit: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `compare`. `axis`: what the runs have in common at `at`, steps or tokens of training.

    `is_same_data`: None where a run has no fingerprint. `warnings` say what makes figures incomparable, the gravest
    first. `compared`: the sections of `differences` that all runs have. `evaluated_at`: the common evaluation, on the
    same axis; None where there is none.
    """

    runs: tuple[RunHistory, ...]
    is_same_data: bool | None
    warnings: tuple[str, ...]
    compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    axis: Literal["steps", "tokens"]
    at: int | None
    evaluated_at: int | None
    figures: tuple[Figure, ...]

    @staticmethod
    def of(runs: Sequence[RunHistory]) -> Comparison:
        """Compare 2 to 26 runs; raises BadInput for fewer, for more, and for one that is given twice."""
        _check(runs)
        axis: Literal["steps", "tokens"] = "tokens" if len(_said(runs, _tokens_per_step)) > 1 else "steps"
        at, evaluated_at = _common_point(runs, axis), _common_evaluation(runs, axis)
        is_same, warnings = _judged(runs)
        known = {section: values for section, values in _sections(runs) if all(values)}
        return Comparison(
            runs=tuple(runs),
            is_same_data=is_same,
            warnings=tuple(warnings),
            compared=tuple(known),
            differences=tuple(_differences(known)),
            axis=axis,
            at=at,
            evaluated_at=evaluated_at,
            figures=tuple(_figures(runs, axis, at, evaluated_at)),
        )

    def curves(self) -> list[Line]:
        """Return the training losses of the runs, over the common axis."""
        return [Line(_positions(run, self.axis), [step.loss for step in run.steps]) for run in self.runs]

    def data(self) -> dict[str, Any]:
        """Return the comparison for `--json`."""
        return {
            "runs": [{**run.summary, "outcome": run.outcome} for run in self.runs],
            "is_same_data": self.is_same_data,
            "warnings": list(self.warnings),
            "differences": [{"section": d.section, "key": d.key, "values": list(d.values)} for d in self.differences],
            "axis": self.axis,
            "at": self.at,
            "evaluated_at": self.evaluated_at,
            "figures": [{"name": f.name, "unit": f.unit, "values": list(f.values)} for f in self.figures],
            "curves": [_thinned(line) for line in self.curves()],
        }


def _check(runs: Sequence[RunHistory]) -> None:
    if not 2 <= len(runs) <= len(LETTERS):
        raise bad_input(
            wanted=f"2 to {len(LETTERS)} runs", got=str(len(runs)), do="name runs, e.g. two of `gossamer runs`"
        )
    seen: dict[str, str] = {}
    for run in runs:
        place = str(run.run.path.resolve())
        if place in seen:
            raise bad_input(wanted="different runs", got=f"{run.name} twice", do="name another run to compare it with")
        seen[place] = run.name


def _said(runs: Sequence[RunHistory], of: Callable[[RunHistory], Any]) -> set[Any]:
    return {of(run) for run in runs}


def _tokens_per_step(run: RunHistory) -> int:
    return run.start.tokens_per_step if run.start is not None else 0


def _positions(run: RunHistory, axis: str) -> Sequence[int]:
    return run.tokens if axis == "tokens" else [step.step for step in run.steps]


def _common_point(runs: Sequence[RunHistory], axis: str) -> int | None:
    """Return the last step (or number of tokens) that all runs have reached; None where one has no step."""
    if not all(run.steps for run in runs):
        return None
    return min(_positions(run, axis)[-1] for run in runs)


def _evaluations(run: RunHistory, axis: str) -> dict[int, Evaluation]:
    """Return the evaluations of a run by where they are on the axis."""
    if axis == "steps":
        return {one.step: one for one in run.evaluations}
    at = {step.step: tokens for step, tokens in zip(run.steps, run.tokens, strict=True)}
    return {at[one.step]: one for one in run.evaluations if one.step in at}


def _common_evaluation(runs: Sequence[RunHistory], axis: str) -> int | None:
    shared = set.intersection(*(set(_evaluations(run, axis)) for run in runs))
    return max(shared, default=None)


def _judged(runs: Sequence[RunHistory]) -> tuple[bool | None, list[str]]:
    """Return whether the data are the same, and all that a reader must know before the figures."""
    is_same, said = _same_data(runs)
    units = [run.start.loss_unit or "unknown" if run.start else "unknown" for run in runs]
    if len(set(units)) > 1:
        named = ", ".join(f"{letter} {unit}" for letter, unit in zip(LETTERS, units, strict=False))
        said.append(f"The losses have different units ({named}): they cannot be compared.")
    counts = {run.evaluations[-1].sequences for run in runs if run.evaluations}
    if len(counts) > 1:
        said.append(f"The evaluations are of different numbers of sequences: {_listed(sorted(counts))}.")
    sets = {run.evaluations[-1].name for run in runs if run.evaluations}
    if len(sets) > 1:
        said.append(f"The evaluations are of different validation sets: {_listed(sorted(sets))}.")
    steps = [_tokens_per_step(run) for run in runs]
    if len(set(steps)) > 1:
        said.append(f"A step has different numbers of tokens ({_listed(steps)}): the runs are compared by tokens.")
    for letter, run in zip(LETTERS, runs, strict=False):
        if run.outcome == "running":
            said.append(f"{letter} is still being trained: these are its figures up to now.")
        said += [f"{letter}: {note}" for note in run.notes]
        if not run.steps:
            said.append(f"{letter} has no step yet: there is nothing to compare it at.")
    return is_same, said


def _same_data(runs: Sequence[RunHistory]) -> tuple[bool | None, list[str]]:
    marks = [run.fingerprint for run in runs]
    names = [run.start.data if run.start else "?" for run in runs]
    told = "; ".join(
        f"{letter} {name}{f' ({mark[:8]})' if mark else ''}"
        for letter, name, mark in zip(LETTERS, names, marks, strict=False)
    )
    if len({mark for mark in marks if mark}) > 1:
        return False, [
            f"The training data differ, in their text, split or tokenizer: {told}. "
            "A lower loss does not mean a better model."
        ]
    if "" in marks:
        without = ", ".join(letter for letter, mark in zip(LETTERS, marks, strict=False) if not mark)
        return None, [f"Whether the data are the same is not known: no fingerprint of {without}. By name: {told}."]
    return True, []


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _sections(runs: Sequence[RunHistory]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the values of every run by section; empty of a run without that file or start, which its notes say."""
    starts = [run.start for run in runs]
    return [
        ("model", [{"model": s.model, "parameters": s.parameters, "trained": s.trained} if s else {} for s in starts]),
        ("data", [{"data": s.data} if s else {} for s in starts]),
        ("configuration", [_without(run.configuration, _ABOUT_THE_FOLDER) for run in runs]),
        ("plan", [_planned(run) for run in runs]),
        ("machine", [{"ranks": s.ranks, "precision": s.precision, **s.machine} if s else {} for s in starts]),
        ("versions", [s.versions if s else {} for s in starts]),
    ]


def _differences(sections: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Difference]:
    """Return every value that is not the same in all runs, section by section."""
    found = []
    for section, values in sections.items():
        keys = dict.fromkeys(key for one in values for key in one)
        if section not in _KEYS_DIFFER:
            keys = {key: None for key in keys if all(key in one for one in values)}
        for key in keys:
            texts = tuple(written(one[key]) if key in one else "-" for one in values)
            if len(set(texts)) > 1:
                found.append(Difference(section, key, texts))
    return found


def _without(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _planned(run: RunHistory) -> dict[str, Any]:
    if run.plan is None:
        return {}
    plan = run.plan
    shown = dotted(_without(plan.model_dump(mode="json"), _LONG))
    return {**shown, "units": len(plan.units), "buckets": len(plan.buckets)}


def _figures(
    runs: Sequence[RunHistory], axis: Literal["steps", "tokens"], at: int | None, evaluated_at: int | None
) -> list[Figure]:
    parts = [_part(run, axis, at) for run in runs]
    evaluations = [_evaluations(run, axis).get(evaluated_at) if evaluated_at is not None else None for run in runs]

    def each(of: Callable[[Sequence[Step]], float | None]) -> tuple[float | None, ...]:
        return tuple(of(part) if part else None for part in parts)

    units = _said(runs, lambda run: run.start.loss_unit if run.start else "")
    unit = next(iter(units)) if len(units) == 1 else ""
    return [
        Figure("steps", "", each(lambda part: part[-1].step)),
        Figure("tokens", "", each(lambda part: sum(step.tokens for step in part))),
        Figure("loss", unit, each(_recent_loss)),
        Figure("validation loss", unit, tuple(one.loss if one else None for one in evaluations)),
        Figure("validation", "bits/byte", tuple(one.bits_per_byte if one else None for one in evaluations)),
        Figure("throughput", "tokens/s", each(lambda part: _median(s.tokens / s.step_s for s in part if s.step_s > 0))),
        Figure("step", "s", each(lambda part: _median(step.step_s for step in part))),
        Figure("exposed communication", "share", each(_exposed)),
        Figure("sent per step", "bytes", each(lambda part: _median(sum(s.wire_bytes.values()) for s in part))),
        Figure("peak memory", "bytes", each(lambda part: max(step.peak_bytes for step in part) or None)),
        Figure("time in steps", "s", each(lambda part: sum(step.step_s for step in part))),
    ]


def _part(run: RunHistory, axis: str, at: int | None) -> Sequence[Step]:
    """Return the steps of a run up to the common point; all of them where there is none."""
    return run.steps if at is None else run.steps[: bisect_right(_positions(run, axis), at)]


def _recent_loss(part: Sequence[Step]) -> float | None:
    finite = [step.loss for step in part[-_RECENT:] if math.isfinite(step.loss)]
    return sum(finite) / len(finite) if finite else None


def _exposed(part: Sequence[Step]) -> float | None:
    return part_of(sum(step.exposed_s for step in part), sum(step.step_s for step in part))


def _median(values: Any) -> float | None:
    found = list(values)
    return float(median(found)) if found else None


def _thinned(line: Line) -> list[tuple[float, float]]:
    points = list(zip(line.xs, line.ys, strict=True))
    every = max(1, math.ceil(len(points) / _CURVE_POINTS))
    return points[::-1][::every][::-1]  # with the last one
