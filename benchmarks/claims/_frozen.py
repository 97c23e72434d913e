"""The protocol of continual learning: tune on one data set, freeze the values, report on another that was never seen.

Source: Cha and Cho, "Hyperparameters in continual learning: a reality check" (arXiv:2403.09066), its two phases:
tuning (mean over several orders of the tasks) and evaluation, on data sets of one scenario that share nothing.
Two families of material share nothing where their data differ, by name and by digest, or their seeds do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from claims._grid import Tuned, tuned
from claims._trials import Trials
from gossamer.spec.errors import bad_input

Run = Callable[[float, str, int], Mapping[str, Any]]  # (value, name of the data, seed) -> "loss" and other figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What trials are made of. digest: of the contents, where two names could have the same."""

    data: str
    seeds: tuple[int, ...]
    digest: str = ""

    def told(self) -> dict[str, Any]:
        return {"data": self.data, "seeds": list(self.seeds), "digest": self.digest}

    def shared(self, other: Family) -> str:
        """Return what both have in words; nothing where they are disjoint."""
        if self.data != other.data and not (self.digest and self.digest == other.digest):
            return ""
        seeds = sorted(set(self.seeds) & set(other.seeds))
        return f"{self.data} with seeds {', '.join(map(str, seeds))}" if seeds else ""


@dataclass(frozen=True, slots=True)
class Reported:
    """One side: what it tried while tuning, and the runs of the frozen value, one per reporting seed."""

    tuned: Tuned
    runs: list[Mapping[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [float(run["loss"]) for run in self.runs]

    @property
    def loss(self) -> float:
        return mean(self.losses)

    def told(self) -> dict[str, Any]:
        return {"value": self.tuned.best, "tuned": self.tuned.told(), "runs": [dict(run) for run in self.runs]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """Values are tuned on `tuned_on` alone and reported on `reported_on` alone; both have nothing in common."""

    tuned_on: Family
    reported_on: Family

    def __post_init__(self) -> None:
        if both := self.tuned_on.shared(self.reported_on):
            raise bad_input(
                wanted="values that are tuned on other data or seeds than they are reported on",
                got=f"{both} in both",
                do="name another data set, or seeds of its own, to report on",
            )

    def __call__(
        self, sides: Mapping[str, Run], starts: Mapping[str, float], trials: Trials, **grid: Any
    ) -> dict[str, Reported]:
        """Return what each side found; `grid` goes to `_grid.tuned`, which gives all sides as many trials.

        A point of the grid is worth its mean loss over the tuning seeds. No run sees the reporting data before all
        values are frozen.
        """

        def once(name: str, value: float, family: Family, seed: int) -> Mapping[str, Any]:
            key = f"{name}, {family.data}, value {value:.6g}, seed {seed}"
            found: Mapping[str, Any] = trials(key, lambda: dict(sides[name](value, family.data, seed)))
            return found

        def score(name: str) -> Callable[[float], float]:
            tuning = self.tuned_on
            return lambda value: mean(float(once(name, value, tuning, seed)["loss"]) for seed in tuning.seeds)

        grids = tuned({name: score(name) for name in sides}, starts, **grid)
        return {
            name: Reported(one, [once(name, one.best, self.reported_on, seed) for seed in self.reported_on.seeds])
            for name, one in grids.items()
        }

    def told(self) -> dict[str, Any]:
        """As a row says it; `check_rows` reads it again."""
        return {"tuned_on": self.tuned_on.told(), "reported_on": self.reported_on.told()}


def check_rows(study: str, details: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a row whose values were tuned on what it reports, whoever wrote it."""
    for each in details:
        if ("tuned_on" in each) != ("reported_on" in each):
            given, missing = ("tuned_on", "reported_on") if "tuned_on" in each else ("reported_on", "tuned_on")
            raise bad_input(
                wanted="tuned_on and reported_on", got=f"{given} alone", do=f"say {missing} in its details", key=study
            )
        if "tuned_on" in each:
            one, other = (
                Family(data=said["data"], seeds=tuple(said["seeds"]), digest=said.get("digest", ""))
                for said in (each["tuned_on"], each["reported_on"])
            )
            if both := one.shared(other):
                raise bad_input(
                    wanted="a report on what was never seen while tuning",
                    got=f"values that were tuned on {both}",
                    do="tune on other data or seeds",
                    key=study,
                )
