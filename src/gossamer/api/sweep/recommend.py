"""`gossamer recommend`: what to try next, by a regression of the scores of finished sweeps on their configurations.

Features are the values of the resolved configuration that differ among the runs: numbers (logarithms where they span a
factor of 10), and one column for each other value. So a sweep of another task (its model's sizes, batch, data) is a row
like any other. AutoDistiller of H. Zhang et al., Distiller, SustaiNLP 2021, https://arxiv.org/abs/2109.11105.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from gossamer.api.sweep.command import checked
from gossamer.api.sweep.journal import SweepFolder
from gossamer.api.sweep.regression import Array, Ridge, unseen_errors
from gossamer.api.sweep.trial import METRICS, common_metric
from gossamer.settings.grid import Axis, Grid
from gossamer.spec.errors import BadInput, bad_input

_FEWEST = 6  # rows
_MOST = 10_000  # combinations

Values = Mapping[str, Any]  # key of the configuration -> value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A configuration with its mean score over seeds."""

    values: Values
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSweep:
    """The finished runs of one sweep's folder. `tried`: key -> its values in them, as written."""

    file: Path
    metric: str
    rows: tuple[Row, ...]
    tried: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(path: Path) -> ReadSweep:
        """Read a folder. Raises BadInput for one that is no sweep's, or has no run that is done."""
        place = SweepFolder(path)
        file = next((one for one in sorted(path.glob("run.*")) if one.is_file()), None)
        try:
            asked = json.loads(place.asked_file.read_text("utf-8"))
            chosen = place.points()
            fixed = asked["settings"] if "sampler" in asked else []
            points = [[*fixed, *(f"{key}={value}" for key, value in one.items())] for one in chosen] or asked[
                "settings"
            ]
        except (OSError, ValueError, KeyError, TypeError):
            points = []
        done = [one for one in place.results().values() if one.is_done]
        metric = common_metric(done)
        if file is None or not points or metric is None:
            do = "name the folder that `gossamer sweep` told, after it has ended"
            raise bad_input(wanted="the folder of a sweep with runs that are done", got=str(path), do=do)
        scores: dict[tuple[int, int], list[float]] = {}
        for one in done:
            if (found := re.fullmatch(r"(\d+)-seed-?\d+-(\d+)steps", one.trial)) and int(found[1]) < len(points):
                scores.setdefault((int(found[1]), int(found[2])), []).append(one.figures[metric])
        rows = tuple(
            Row(values=configuration(file, [*_but(points[at], "train.steps"), f"train.steps={steps}"]), score=mean(of))
            for (at, steps), of in sorted(scores.items())
        )
        tried: dict[str, dict[str, None]] = {}
        for key, _, value in (one.partition("=") for at in sorted({at for at, _ in scores}) for one in points[at]):
            tried.setdefault(key, {})[value] = None
        return ReadSweep(file=file, metric=metric, rows=rows, tried={key: tuple(of) for key, of in tried.items()})


def _but(point: Sequence[str], key: str) -> list[str]:
    return [one for one in point if one.partition("=")[0] != key]


def configuration(file: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of a run's configuration that may matter to its score, by key. Raises BadInput."""
    found: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, one in value.items():
                walk(one, f"{key}.{name}" if key else str(name))
        else:
            is_plain = value is None or isinstance(value, bool | int | float | str)
            found[key] = value if is_plain else json.dumps(value, sort_keys=True)

    config = checked(file, settings).model_dump(mode="json", exclude={"run": True, "train": {"seed"}})
    walk(config, "")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One feature: the number at a key (`equals` None), or whether the value there is `equals`."""

    key: str
    equals: str | None
    is_log: bool = False

    def of(self, values: Values) -> float:
        value: Any = values.get(self.key)
        if self.equals is not None:
            return float(json.dumps(value) == self.equals)
        return float(np.log10(value)) if self.is_log else float(value)


def columns_of(rows: Sequence[Values]) -> list[Column]:
    """Return the features of keys whose values differ among the rows."""
    found = []
    for key in sorted({key for row in rows for key in row}):
        values = [row.get(key) for row in rows]
        kinds = sorted({json.dumps(one) for one in values})
        if len(kinds) < 2:
            continue
        numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
        if len(numbers) == len(values):
            is_log = min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
            found.append(Column(key=key, equals=None, is_log=is_log))
        else:
            found += [Column(key=key, equals=one) for one in kinds]
    return found


def recommend_command(
    folders: Sequence[Path], settings: Sequence[str] = (), *, file: Path | None = None, top: int = 5
) -> dict[str, Any]:
    """Return the combinations with the best predicted score that were not tried, best first; JSON-ready.

    `settings`: key=value,value of the combinations; none: the values that the sweeps tried. `file`: the configuration
    they are for; None: that of the first sweep. Raises BadInput.
    """
    sweeps = [ReadSweep.of(one) for one in folders]
    if len(metrics := dict.fromkeys(one.metric for one in sweeps)) > 1:
        do = "name sweeps of one metric: the same data and evaluations"
        raise bad_input(wanted="sweeps that are ranked by one figure", got=" and ".join(metrics), do=do)
    rows = [row for one in sweeps for row in one.rows]
    if len(rows) < _FEWEST:
        do = "sweep over more values first"
        raise bad_input(wanted=f"{_FEWEST} or more combinations that are done", got=str(len(rows)), do=do)
    columns = columns_of([row.values for row in rows])
    if not columns:
        raise bad_input(wanted="runs that differ in a key", got="none", do="sweep over a key's values first")
    target = file or sweeps[0].file
    candidates = _candidates(sweeps, settings, target)
    x, y = _matrix([row.values for row in rows], columns), np.array([row.score for row in rows])
    found = [(point, configuration(target, point)) for point in candidates]
    _check_known([values for _, values in found], [row.values for row in rows], columns)
    open_ = [(point, values) for point, values in found if all(values != row.values for row in rows)]
    if not open_:
        do = "give other values as key=value,value, or another task with --for"
        raise bad_input(wanted="a combination that was not tried", got=f"{len(found)} that were", do=do)
    guesses = Ridge.of(x, y).predict(_matrix([values for _, values in open_], columns))
    ours, of_mean = unseen_errors(x, y)
    best = np.argsort(guesses, kind="stable")[:top]
    return {
        "unit": METRICS[sweeps[0].metric],
        "rows": len(rows),
        "features": sorted({one.key for one in columns}),
        "error": ours,
        "error_of_mean": of_mean,
        "open": len(open_),
        "untold": _untold([values for _, values in found], [row.values for row in rows], columns),
        "points": [{"overrides": list(open_[at][0]), "predicted": float(guesses[at])} for at in best],
    }


def _matrix(rows: Sequence[Values], columns: Sequence[Column]) -> Array:
    return np.array([[one.of(row) for one in columns] for row in rows])


def _candidates(sweeps: Sequence[ReadSweep], settings: Sequence[str], target: Path) -> list[tuple[str, ...]]:
    grid = Grid.parse(settings)
    if not settings:
        tried: dict[str, dict[str, None]] = {}
        for key, values in ((key, values) for one in sweeps for key, values in one.tried.items()):
            tried.setdefault(key, {}).update(dict.fromkeys(values))
        grid = Grid(tuple(Axis(key, tuple(values)) for key, values in tried.items()))
    grids = [Grid(axes) for axes in dict.fromkeys(_compatible(grid.axes, target))]
    count = sum(int(np.prod([len(axis.values) for axis in one.axes], dtype=object)) for one in grids)
    if count > _MOST:
        do = "give fewer values as key=value,value"
        raise bad_input(wanted=f"{_MOST:,} combinations at most", got=f"{count:,}", do=do)
    return [point for one in grids for point in one.points()]


def _compatible(axes: tuple[Axis, ...], target: Path) -> list[tuple[Axis, ...]]:
    """Return the largest parts of `axes` whose keys a run can have together, such as the rate of one optimizer."""
    for first, second in combinations(axes, 2):
        if _excludes(first, second, target):
            return [
                part
                for left in (second, first)
                for part in _compatible(tuple(one for one in axes if one is not left), target)
            ]
    return [axes]


def _excludes(first: Axis, second: Axis, target: Path) -> bool:
    """Return whether a run with a value of `second` has no value of `first` any more."""
    try:
        values = configuration(target, [f"{one.key}={one.values[0]}" for one in (first, second)])
    except BadInput:
        return True
    return not any(key == first.key or key.startswith(f"{first.key}.") for key in values)


def _check_known(candidates: Sequence[Values], rows: Sequence[Values], columns: Sequence[Column]) -> None:
    """Raise BadInput where candidates differ in a key that never varied, or in a value that is unknown."""
    known = {one.key: one for one in columns}
    for key in sorted({key for one in candidates for key in one} | known.keys()):
        asked = {json.dumps(one.get(key)) for one in candidates}
        tried = {json.dumps(row.get(key)) for row in rows}
        column = known.get(key)
        if column is not None and column.equals is None:
            low = 0.0 if column.is_log else -np.inf
            bad = [one for one in asked if not re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", one) or float(one) <= low]
        else:
            bad = sorted(asked - tried) if column is not None or len(asked) > 1 else []
        if bad and (len(asked) > 1 or (column is not None and column.equals is None)):
            is_missing = bad[0] == "null"
            got = f"{'no value' if is_missing else bad[0]}, and the runs have {', '.join(sorted(tried)[:4])}"
            do = "sweep over this key's values first, or leave it out"
            if is_missing:
                do = f"write {key} in the file that they are for (--for), or as {key}=VALUE"
            raise bad_input(wanted="values that the sweeps tell something about", got=got, do=do, key=key)


def _untold(candidates: Sequence[Values], rows: Sequence[Values], columns: Sequence[Column]) -> list[str]:
    """Return the keys that are the same in all candidates, and of whose value no run tells anything."""
    numbers = {one.key for one in columns if one.equals is None}
    found = []
    for key in sorted({key for one in (*candidates, *rows) for key in one} - numbers):
        asked = {json.dumps(one.get(key)) for one in candidates}
        if len(asked) == 1 and not asked <= {json.dumps(row.get(key)) for row in rows}:
            found.append(key)
    return found
