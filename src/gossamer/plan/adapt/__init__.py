"""Adaptive policies: from what a run has measured to the settings it goes on with, one policy per file. Pure.

A policy is asked at a step border, on every rank with the same numbers or on one rank for all; what it answers goes
into a plan, and a run obeys it from the next step on. Nothing here touches a tensor of the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from gossamer.spec.method_config import Written
from gossamer.spec.registry import Registry
from gossamer.spec.statistics import Paths, Statistics

AdaptRule: TypeAlias = tuple[str, str, Written]  # pattern of parameter names, link level or link ("0>1"), method


@dataclass(frozen=True, slots=True)
class AdaptChoices:
    """`rules`: for a parameter and level the first rule that matches holds. `reason`: one line for whoever asks."""

    rules: tuple[AdaptRule, ...]
    reason: str


class Policy(ABC):
    """A frozen dataclass; its fields are what the user may set.

    needs_paths: it looks at every rank's own way out and in; for_links: it speaks of pipeline links, not of gradients.
    """

    needs_paths: ClassVar[bool] = False
    for_links: ClassVar[bool] = False

    def to_measure(self, now: Written) -> tuple[Written, ...]:
        """The settings to measure for parameters that `now` serves: the default first; none: nothing to choose there.

        A policy that measures no setting at all speaks for all parameters at once.
        """
        return ()

    @abstractmethod
    def choose(self, statistics: Statistics, paths: Paths) -> AdaptChoices:
        """The settings to go on with. Never raises for odd measurements: what cannot be judged stays as it is."""


REGISTRY: Registry[Policy] = Registry(__name__, Policy)
names = REGISTRY.names
build = REGISTRY.build
