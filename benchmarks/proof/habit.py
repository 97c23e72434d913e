"""A module that somebody wrote, how it is trained, what must come of it, and the list of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from proof.scene import RATE, Rows

Factory = Callable[[], nn.Module]
EQUAL, OR_REFUSED = "equal", "equal or refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """`factory` returns the module.

    wanted: "equal", or "equal or refused". hard: whether it is of a kind that once trained wrongly, was lost to nan,
    or crashed, before a proof was there. late: whether what is special about it shows after the first step alone.
    train, plan: sections of the configuration, beside the usual ones. data: what it is trained on; text: that it is
    trained on text, evaluated in the middle and at the end, and then goes on with this one. draws: whether the forward
    draws random numbers, which are keyed. stopped: after how many steps the run ends, to be resumed in other
    processes; 0: it is not. apart: whether each replica keeps something for itself (a counter, a memory), as replicas
    of plain torch do, so that together they are not one process: they are compared with such replicas, and a run that
    proves says so. alone: whether one process trains it, too. tolerance: largest difference, as a part of the
    largest entry.
    """

    name: str
    page: str
    factory: Factory
    wanted: str
    hard: bool = False
    late: bool = False
    train: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 3
    replicas: int = 1
    data: Callable[[], Dataset[Any]] = Rows
    text: str = ""
    draws: bool = False
    stopped: int = 0
    apart: bool = False
    alone: bool = True
    tolerance: float = 2e-5

    @property
    def written(self) -> str:
        """As model.factory has it."""
        return f"{self.factory.__module__}:{self.factory.__name__}"

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """Name -> arguments."""
        found: Mapping[str, Any] = self.train.get("optimizer", {"sgd": {"lr": RATE}})
        return found

    def is_good(self, result: str) -> bool:
        return result in self.wanted.split(" or ")


HABITS: dict[str, Habit] = {}


def habit(wanted: str, **told: Any) -> Callable[[Factory], Factory]:
    """Enters a factory in the list, under its own name."""

    def enter(factory: Factory) -> Factory:
        name, page = factory.__name__, factory.__module__.rpartition(".")[2]
        assert name not in HABITS, f"two habits are called {name}"
        assert inspect.getdoc(factory), f"{name}: wanted a sentence that says what it is"
        assert wanted in (EQUAL, OR_REFUSED), f"{name}: wanted {wanted!r}"
        HABITS[name] = Habit(name=name, page=page, factory=factory, wanted=wanted, **told)
        return factory

    return enter
