"""`gossamer sweep`: check every point before anything starts, train what is not done yet, and rank the results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.api.started_run import check_ranks
from gossamer.api.sweep.journal import SweepFolder
from gossamer.api.sweep.ranking import ranked, survivors
from gossamer.api.sweep.trial import METRICS, Trial, TrialResult, common_metric
from gossamer.api.sweep.trial_process import TrialRunner
from gossamer.launch.environment import is_rank_of_launcher
from gossamer.settings import load
from gossamer.settings.grid import Grid
from gossamer.settings.methods import check_methods
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, RunFailed, bad_input
from gossamer.spec.unread_keys import check_given
from gossamer.view.run_lock import held

_MOST_RUNGS = 4  # the first has an eighth of the steps
_OURS = {  # keys that the sweep sets for every trial, and what to give instead
    "run.directory": "--folder",
    "run.name": "nothing: trials are named by their number",
    "run.display": "nothing: what a trial prints is in the sweep's folder",
}

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep whose points have all been checked. `rungs`: fractions of the steps, increasing; the last is 1."""

    file: Path
    points: tuple[tuple[str, ...], ...]  # overrides
    configs: tuple[RunConfig, ...]
    seeds: int
    rungs: tuple[float, ...]

    @staticmethod
    def of(file: Path, settings: Sequence[str], *, seeds: int, halving: bool) -> Sweep:
        """Check a sweep. Raises BadInput for a key that does not exist, a value that does not fit, and too few runs."""
        grid = Grid.parse(settings)
        varied = [axis.key for axis in grid.varied]
        check_keys([axis.key for axis in grid.axes], varied)
        if halving and "train.steps" in varied:
            raise bad_input(
                wanted="one train.steps with --halving, which trains on parts of it",
                got="several values",
                do="give one, or leave --halving out",
                key="train.steps",
            )
        points = grid.points()
        if len(points) * seeds < 2:
            raise bad_input(
                wanted="a key with several values, such as train.batch=8,16, or --seeds 2 or more",
                got="one run",
                do="give more values, or use `gossamer train`",
            )
        configs = tuple(checked(file, point) for point in points)
        rungs = min(_MOST_RUNGS, int(math.log2(len(points))) + 1) if halving else 1
        if halving and rungs == 1:
            raise bad_input(
                wanted="two combinations of values or more with --halving", got="one", do="leave --halving out"
            )
        return Sweep(
            file=file,
            points=tuple(points),
            configs=configs,
            seeds=seeds,
            rungs=tuple(0.5**n for n in reversed(range(rungs))),
        )

    def asked(self) -> dict[str, Any]:
        """Return what was asked, as sweep.json keeps it: equal for equal sweeps."""
        shared = [config.model_dump(mode="json", exclude={"run"}) for config in self.configs]
        digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()
        settings = [list(point) for point in self.points]
        return {"settings": settings, "seeds": self.seeds, "rungs": list(self.rungs), "configuration": digest}

    def folder(self) -> Path:
        """Return the usual folder of this sweep: the same for the same sweep, so that one command goes on."""
        digest = hashlib.sha256(json.dumps(self.asked(), sort_keys=True).encode()).hexdigest()
        return Path(self.configs[0].run.directory) / f"sweep-{self.file.stem}-{digest[:8]}"

    def trials(self, points: Sequence[int], fraction: float) -> list[Trial]:
        """Return the trials of these points on a fraction of their steps, seed by seed within each point."""
        return [
            Trial(
                point=point,
                overrides=self.points[point],
                seed=self.configs[point].train.seed + seed,
                steps=max(1, round(self.configs[point].train.steps * fraction)),
            )
            for point in points
            for seed in range(self.seeds)
        ]


def check_keys(keys: Sequence[str], varied: Sequence[str]) -> None:
    """Raise BadInput for a key that the sweep sets itself, and for seeds as values."""
    for key in keys:
        if key in _OURS:
            raise bad_input(wanted="keys that a sweep leaves open", got=key, do=f"give {_OURS[key]}", key=key)
    if "train.seed" in varied:
        raise bad_input(wanted="seeds by --seeds N", got="several values", do="write --seeds N", key="train.seed")


def check_start() -> None:
    """Raise BadInput in a process that a launcher of ranks has started."""
    if is_rank_of_launcher():
        raise BadInput("a sweep starts its runs itself: start it without torchrun, srun or mpirun")


def checked(file: Path, point: Sequence[str]) -> RunConfig:
    """Return the configuration of a point, checked as far as that goes without data. Raises BadInput."""
    resolved = load(file, point)
    check_methods(resolved)
    check_given(resolved.config)
    machines = resolved.config.machines
    try:
        check_ranks(resolved.config, machines.processes * max(1, len(machines.hosts)))
    except BadInput as error:
        raise BadInput(f"{error.message} (of the runs with {' '.join(point)})", key=error.key) from None
    return resolved.config


def sweep_command(
    file: Path,
    settings: Sequence[str],
    *,
    seeds: int = 1,
    jobs: int = 1,
    halving: bool = False,
    folder: Path | None = None,
    tell: Tell,
) -> dict[str, Any]:
    """Run `gossamer sweep`; return its ranking, best first. What an earlier start has done is not run again.

    `tell` gets a line per trial that ends. Raises BadInput before anything starts, RunFailed where all trials of a rung
    fail, Interrupted.
    """
    check_start()
    sweep = Sweep.of(file, settings, seeds=seeds, halving=halving)
    place = SweepFolder(folder or sweep.folder())
    with held(place.path):
        place.open(sweep.asked(), file)
        runner = TrialRunner(
            folder=place,
            config=place.config_file(file),
            jobs=jobs,
            processes=max(config.machines.processes for config in sweep.configs),
        )
        trials = _all_rungs(sweep, place, runner, tell)
        return ranking(trials, place)


def ranking(trials: Sequence[Trial], place: SweepFolder) -> dict[str, Any]:
    """Return the figures of a sweep that has ended, best point first; JSON-ready."""
    results = place.results()
    metric = common_metric([results[one.name] for one in trials])
    return {
        "folder": str(place.path),
        "metric": metric,
        "unit": METRICS[metric] if metric is not None else None,
        "trials": len(trials),
        "failed": sum(not results[one.name].is_done for one in trials),
        "points": [score.row() for score in ranked(trials, results, metric)],
    }


def _all_rungs(sweep: Sweep, place: SweepFolder, runner: TrialRunner, tell: Tell) -> list[Trial]:
    """Run every rung; return all trials. Raises RunFailed where all trials of one fail."""
    points, every = list(range(len(sweep.points))), list[Trial]()
    for number, fraction in enumerate(sweep.rungs):
        trials = sweep.trials(points, fraction)
        if number:
            tell(f"rung {number + 1} of {len(sweep.rungs)}: {len(points)} go on, on {trials[0].steps} steps")
        every += trials
        run_open(trials, place, runner, tell)
        results = place.results()
        if not any(results[one.name].is_done for one in trials):
            raise RunFailed(all_failed(trials, results, place))
        points = survivors(trials, results)
    return every


def run_open(trials: Sequence[Trial], place: SweepFolder, runner: TrialRunner, tell: Tell) -> None:
    """Run the trials that are not done yet; those that failed are tried again."""
    known = place.results()
    open_trials = [one for one in trials if one.name not in known or not known[one.name].is_done]
    done = len(trials) - len(open_trials)
    if done:
        tell(f"{done} of {len(trials)} trials are done already")

    def ended(trial: Trial, result: TrialResult) -> None:
        nonlocal done
        place.append(result)
        done += 1
        tell(f"{done}/{len(trials)}  {' '.join(trial.overrides)} seed {trial.seed}: {_outcome(result)}")

    runner.run(open_trials, ended)


def _outcome(result: TrialResult) -> str:
    if not result.is_done:
        return f"failed: {first_line(result.error)}"
    name = next((name for name in METRICS if name in result.figures), None)
    return "done" if name is None else f"{METRICS[name]} {result.figures[name]:.4f}"


def first_line(text: str) -> str:
    """Return the line of an error that says most: of a failed run's page its likely cause, else the first."""
    lines = [" ".join(line.strip(" |").split()) for line in text.splitlines() if not line.startswith("+-")]
    lines = [line for line in lines if line]
    cause = next((line.removeprefix("likely cause ") for line in lines if line.startswith("likely cause ")), "")
    return cause or next(iter(lines), "no reason is known")


def all_failed(trials: Sequence[Trial], results: Mapping[str, TrialResult], place: SweepFolder) -> str:
    """Return the message about a rung of which nothing is done: every reason once, with how often it occurred."""
    causes: dict[str, list[Trial]] = {}
    for one in trials:
        causes.setdefault(first_line(results[one.name].error), []).append(one)
    said = [f"{len(of)} of {len(trials)}: {cause}\n  log: {_log(place, of[0])}" for cause, of in causes.items()]
    shown = "\n".join(said[:3]) + ("\n..." if len(said) > 3 else "")
    return f"all {len(trials)} trials failed, in {place.path}:\n{shown}\nThe same command tries them again"


def _log(place: SweepFolder, trial: Trial) -> Path:
    """Return the file with the messages of a trial."""
    return place.log_of(trial).with_suffix(".err")
