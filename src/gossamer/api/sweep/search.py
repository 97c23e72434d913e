"""`gossamer sweep --sampler`: points that a sampler of Optuna chooses by the results so far (extra `optuna`).

`train.optimizer.adamw.lr=1e-5..1e-2:log` is a range, `train.batch=8,16` a choice. Points are chosen --jobs at a time:
each from the results of the rounds before, by a sampler seeded with its own number. So a search that was stopped goes
on as if it had not been: what is chosen is a function of what is kept in its folder. That excludes samplers with a
state of their own, such as CMA-ES.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.api.sweep.command import Tell, all_failed, check_keys, check_start, checked, ranking, run_open
from gossamer.api.sweep.journal import SweepFolder
from gossamer.api.sweep.ranking import ranked
from gossamer.api.sweep.trial import Trial, TrialResult, common_metric
from gossamer.api.sweep.trial_process import TrialRunner
from gossamer.settings.grid import Axis
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, RunFailed, bad_input
from gossamer.spec.extras import install
from gossamer.spec.suggest import nearest
from gossamer.view.run_lock import held

SAMPLERS: dict[str, Callable[[Any, int], Any]] = {
    "tpe": lambda optuna, seed: optuna.samplers.TPESampler(seed=seed),
    "gp": lambda optuna, seed: optuna.samplers.GPSampler(seed=seed),
    "random": lambda optuna, seed: optuna.samplers.RandomSampler(seed=seed),
}
_DIGITS = 4  # of a value in a range: so that it can be read, and written down
_HOPELESS = 3  # points that all fail: the search ends

Point = Mapping[str, Any]  # key -> value


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers from `low` to `high` that a key may have, drawn by their logarithm if `is_log`."""

    key: str
    low: float
    high: float
    is_log: bool
    is_whole: bool

    @staticmethod
    def parse(written: str) -> Range | None:
        """Parse key=low..high or key=low..high:log; None for another form. Raises BadInput for an empty range."""
        key, _, text = written.partition("=")
        key, bare = key.strip().removeprefix("--"), text.strip().removesuffix(":log")
        is_log = bare != text.strip()
        ends = bare.split("..")
        try:
            low, high = map(float, ends)
        except ValueError:
            return None
        if not low < high or (is_log and low <= 0):
            do = "write low..high, or low..high:log of numbers above 0"
            raise bad_input(wanted="a range of numbers, the lower one first", got=text.strip(), do=do, key=key)
        is_whole = all(re.fullmatch(r"[+-]?\d+", one) for one in ends)
        return Range(key=key, low=low, high=high, is_log=is_log, is_whole=is_whole)

    def distribution(self, optuna: Any) -> Any:
        """Return the range as Optuna's samplers take it."""
        kind = optuna.distributions
        if self.is_whole:
            return kind.IntDistribution(int(self.low), int(self.high), log=self.is_log)
        return kind.FloatDistribution(self.low, self.high, log=self.is_log)

    def readable(self, value: float) -> float | int:
        """Return the value with few digits, inside of the range."""
        if self.is_whole:
            return int(value)
        return min(self.high, max(self.low, float(f"{value:.{_DIGITS}g}")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search whose keys and ends have been checked. `fixed`: settings of all runs, key=value."""

    file: Path
    ranges: tuple[Range, ...]
    choices: tuple[Axis, ...]
    fixed: tuple[str, ...]
    sampler: str
    seeds: int
    config: RunConfig

    @staticmethod
    def of(file: Path, settings: Sequence[str], *, sampler: str, seeds: int) -> Search:
        """Check a search. Raises BadInput for an unknown sampler or key, and for a value that does not fit."""
        if sampler not in SAMPLERS:
            do, wanted = nearest(sampler, SAMPLERS), "one of " + ", ".join(SAMPLERS)
            raise bad_input(wanted=wanted, got=repr(sampler), do=do, key="--sampler")
        parsed: list[Range | Axis] = [Range.parse(one) or Axis.parse(one) for one in settings]
        ranges = tuple(one for one in parsed if isinstance(one, Range))
        axes = [one for one in parsed if isinstance(one, Axis)]
        choices = tuple(axis for axis in axes if len(axis.values) > 1)
        fixed = tuple(f"{axis.key}={axis.values[0]}" for axis in axes if len(axis.values) == 1)
        keys, varied = [one.key for one in parsed], [one.key for one in ranges] + [axis.key for axis in choices]
        check_keys(keys, varied)
        if twice := [key for n, key in enumerate(keys) if key in keys[:n]]:
            raise bad_input(wanted="every key once", got=f"{twice[0]} twice", do="leave one out", key=twice[0])
        if not varied:
            do = "write a range such as train.optimizer.adamw.lr=1e-5..1e-2:log, or values with commas"
            raise bad_input(wanted="a key with a range or several values", got="none", do=do, key="--sampler")
        if "train.steps" in varied:
            do = "give one: a loss after more steps is lower, whatever else is chosen"
            raise bad_input(wanted="one train.steps", got="several values", do=do, key="train.steps")
        first = {one.key: one.readable(one.low) for one in ranges} | {one.key: one.values[0] for one in choices}
        ends: list[Point] = [first, *({**first, one.key: one.readable(one.high)} for one in ranges)]
        ends += [{**first, axis.key: value} for axis in choices for value in axis.values[1:]]
        configs = [checked(file, (*fixed, *_written(point))) for point in ends]
        return Search(
            file=file, ranges=ranges, choices=choices, fixed=fixed, sampler=sampler, seeds=seeds, config=configs[0]
        )

    def asked(self) -> dict[str, Any]:
        """Return what was asked, as sweep.json keeps it; without the number of points, so that more can be asked."""
        shared = self.config.model_dump(mode="json", exclude={"run"})
        return {
            "sampler": self.sampler,
            "ranges": {one.key: [one.low, one.high, one.is_log, one.is_whole] for one in self.ranges},
            "choices": {axis.key: list(axis.values) for axis in self.choices},
            "settings": list(self.fixed),
            "seeds": self.seeds,
            "configuration": hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest(),
        }

    def folder(self) -> Path:
        """Return the usual folder of this search: the same for the same search, so that one command goes on."""
        digest = hashlib.sha256(json.dumps(self.asked(), sort_keys=True).encode()).hexdigest()
        return Path(self.config.run.directory) / f"search-{self.file.stem}-{digest[:8]}"

    def trials(self, number: int, point: Point) -> list[Trial]:
        """Return the trials of a point, one for each seed."""
        overrides, train = (*self.fixed, *_written(point)), self.config.train
        return [
            Trial(point=number, overrides=overrides, seed=train.seed + seed, steps=train.steps)
            for seed in range(self.seeds)
        ]

    def choose(self, optuna: Any, points: Sequence[Point], results: Mapping[str, TrialResult]) -> Point:
        """Return the next point, by the results of those before; points without one are running."""
        spaces: dict[str, Any] = {one.key: one.distribution(optuna) for one in self.ranges}
        spaces |= {axis.key: optuna.distributions.CategoricalDistribution(axis.values) for axis in self.choices}
        sampler = SAMPLERS[self.sampler](optuna, self.config.train.seed + len(points))
        study = optuna.create_study(sampler=sampler, direction="minimize")
        trials = [one for number, point in enumerate(points) for one in self.trials(number, point)]
        metric = common_metric([results[one.name] for one in trials if one.name in results])
        means = {score.point: score.mean for score in ranked(trials, results, metric)}
        kind = optuna.trial.TrialState
        for number, point in enumerate(points):
            is_over = all(one.name in results for one in self.trials(number, point))
            state = kind.RUNNING if not is_over else kind.FAIL if means[number] is None else kind.COMPLETE
            value = means[number] if state == kind.COMPLETE else None
            study.add_trial(
                optuna.trial.create_trial(state=state, value=value, params=dict(point), distributions=spaces)
            )
        found = study.ask(spaces).params
        return {**found, **{one.key: one.readable(found[one.key]) for one in self.ranges}}


def _written(point: Point) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in point.items())


def search_command(
    file: Path,
    settings: Sequence[str],
    *,
    sampler: str,
    points: int,
    seeds: int = 1,
    jobs: int = 1,
    folder: Path | None = None,
    tell: Tell,
) -> dict[str, Any]:
    """Run `gossamer sweep --sampler`; return the ranking of `points` points, best first.

    What an earlier start has done is not run again. `tell` gets a line per trial that ends. Raises BadInput before
    anything starts, RunFailed where the first points all fail, Interrupted.
    """
    check_start()
    optuna = _imported()
    search = Search.of(file, settings, sampler=sampler, seeds=seeds)
    place = SweepFolder(folder or search.folder())
    with held(place.path):
        place.open(search.asked(), file)
        runner = TrialRunner(
            folder=place, config=place.config_file(file), jobs=jobs, processes=search.config.machines.processes
        )
        chosen: list[Point] = [*place.points()[:points]]
        trials = [one for number, point in enumerate(chosen) for one in search.trials(number, point)]
        while True:
            run_open(trials, place, runner, tell)
            results = place.results()
            if len(chosen) >= min(points, _HOPELESS) and not any(results[one.name].is_done for one in trials):
                raise RunFailed(all_failed(trials, results, place))
            if len(chosen) >= points:
                return {**ranking(trials, place), "sampler": sampler}
            for number in range(len(chosen), min(points, len(chosen) + jobs)):
                chosen.append(search.choose(optuna, chosen, results))
                trials += search.trials(number, chosen[-1])
            place.keep_points(chosen)


def _imported() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "optuna":
            raise
        raise BadInput(f"--sampler needs the package optuna: {install('optuna')}", key="--sampler") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
