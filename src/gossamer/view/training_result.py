"""The result of a run for Python: its summary as a mapping, and its records as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.spec.records import Evaluation, Start, Step
from gossamer.view.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class EvaluationCurve:
    """The evaluations of one validation set, an element each: step int64, loss in nats and metrics float64."""

    steps: NDArray[np.int64]
    losses: NDArray[np.float64]
    bits_per_byte: NDArray[np.float64]  # nan where the data is not text
    metrics: Mapping[str, NDArray[np.float64]]


class TrainingResult(dict[str, Any]):
    """The summary of a run as `summarize` returns it, with its records as arrays beside it.

    The arrays are read from the run directory when they are first asked for. Steps that a resume repeated count once,
    with their last values; rejected steps are left out.
    """

    def __init__(self, summary: Mapping[str, Any], *, run: RunDirectory) -> None:
        super().__init__(summary)
        self.run = run

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return the numbers of the committed steps, (n,) int64; the first step is 1."""
        return np.array(list(self._records[0]), np.int64)

    @property
    def losses(self) -> NDArray[np.float64]:
        """Return the mean training loss of every step, (n,) float64, in nats."""
        return np.array([one.loss for one in self._records[0].values()], np.float64)

    @property
    def evaluations(self) -> dict[str, EvaluationCurve]:
        """Return the evaluations by the name of the validation set, in the order of the configuration."""
        found: dict[str, list[Evaluation]] = {}
        for one in self._records[1].values():
            found.setdefault(one.name, []).append(one)
        return {name: _curve(rows) for name, rows in found.items()}

    @cached_property
    def _records(self) -> tuple[dict[int, Step], dict[tuple[int, str], Evaluation]]:
        steps: dict[int, Step] = {}
        evaluations: dict[tuple[int, str], Evaluation] = {}
        for record in self.run.records():
            if isinstance(record, Start):
                steps = {number: step for number, step in steps.items() if number <= record.step}
                evaluations = {at: one for at, one in evaluations.items() if at[0] <= record.step}
            elif isinstance(record, Step) and record.committed:
                steps[record.step] = record
            elif isinstance(record, Evaluation):
                evaluations[record.step, record.name] = record
        return steps, evaluations


def _curve(rows: list[Evaluation]) -> EvaluationCurve:
    names = dict.fromkeys(name for one in rows for name in one.metrics)
    bits = [np.nan if one.bits_per_byte is None else one.bits_per_byte for one in rows]
    return EvaluationCurve(
        np.array([one.step for one in rows], np.int64),
        np.array([one.loss for one in rows], np.float64),
        np.array(bits, np.float64),
        {name: np.array([one.metrics.get(name, np.nan) for one in rows], np.float64) for name in names},
    )
