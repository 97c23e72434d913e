"""Tune methods on a bracketed grid with one seed, then run the best of each with more seeds, in pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from claims._grid import Tuned, tuned
from claims._lm import Run, trained
from claims._trials import Trials


@dataclass(frozen=True, slots=True)
class Side:
    """One method: its run for a rate, the rate to start at, and the name its trials are kept by."""

    name: str
    run: Callable[[float], Run]
    start: float


@dataclass(frozen=True, slots=True)
class Found:
    """The trials of a side, and at its best rate the loss and the seconds of every seed."""

    tuned: Tuned
    losses: list[float]
    seconds: list[float]

    @property
    def loss(self) -> float:
        return mean(self.losses)

    def told(self) -> dict[str, Any]:
        return {"losses": self.losses, "seconds": self.seconds, "rates": self.tuned.told()}


def measured(sides: list[Side], trials: Trials, *, seeds: int, least: int = 3, most: int = 5) -> dict[str, Found]:
    """Return what each side found; all sides get the same number of trials. The first seed is the one of the grid."""
    by_name = {side.name: side for side in sides}

    def loss(name: str) -> Callable[[float], float]:
        return lambda rate: run_once(name, by_name[name].run(rate), rate, trials)["loss"]

    grids = tuned(
        {name: loss(name) for name in by_name}, {s.name: s.start for s in sides}, factor=2.0, least=least, most=most
    )
    found = {}
    for name, grid in grids.items():
        runs = [
            run_once(name, replace(by_name[name].run(grid.best), seed=seed), grid.best, trials) for seed in range(seeds)
        ]
        found[name] = Found(grid, [one["loss"] for one in runs], [one["seconds"] for one in runs])
    return found


def run_once(name: str, run: Run, rate: float, trials: Trials) -> dict[str, Any]:
    """Return what `trained` does, from the journal where it is there. `name` and the length tell runs apart."""
    shape = f"{run.shape.layers} layers of {run.shape.width}"
    key = f"{name}, {shape}, {run.steps} x {run.tokens}, rate {rate:.4g}, seed {run.seed}"
    return trials(key, lambda: trained(run))


def ratios(found: Mapping[str, Found], one: str, other: str) -> list[float]:
    """Return the ratios of the losses, seed by seed."""
    return [a / b for a, b in zip(found[one].losses, found[other].losses, strict=True)]


def spread(values: list[float]) -> tuple[float, float]:
    return round(min(values), 5), round(max(values), 5)
