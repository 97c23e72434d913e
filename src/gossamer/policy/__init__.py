"""Adaptive compression policies: choose exchange settings from a run's measurements, one policy per file. Pure.

A policy is called between two steps, on every rank with the same numbers or on one rank for all. Its answer goes into
the plan, and takes effect with the next step. A policy touches no tensor of the run.
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
    """The answer of a policy: exchange settings per parameter and link.

    `rules`: for a parameter and level the first rule that matches applies. `reason`: one line for the user.
    """

    rules: tuple[AdaptRule, ...]
    reason: str


class NearbySettings(ABC):
    """The interface by which a policy finds variants of an exchange (other ranks, other codecs) and compares them.

    A recipe implements it: a policy builds no method itself.
    """

    @abstractmethod
    def near(self, written: Written) -> tuple[Written, ...]:
        """Return the variants of an exchange; empty if it has none. Raises BadInput for an unknown exchange."""

    @abstractmethod
    def are_equal(self, one: Written, other: Written) -> bool:
        """Return whether two settings are the same exchange, however written. Raises BadInput for an unknown one."""


class Policy(ABC):
    """An adaptive compression policy: a frozen dataclass whose fields are what the user may set.

    `needs_paths`: the policy uses every rank's uplink and downlink. `for_links`: it sets the compression of pipeline
    links, not of gradients.
    """

    needs_paths: ClassVar[bool] = False
    for_links: ClassVar[bool] = False

    def to_measure(self, now: Written, settings: NearbySettings) -> tuple[Written, ...]:
        """Return the settings to measure for parameters with the exchange `now`: the default first; empty for no
        choice.

        A policy that never measures a setting decides for all parameters at once.
        """
        return ()

    @abstractmethod
    def choose(self, statistics: Statistics, paths: Paths) -> AdaptChoices:
        """Return the settings to use from now on. Never raises for odd measurements: an unjudged setting stays."""


REGISTRY: Registry[Policy] = Registry(__name__, Policy)
names = REGISTRY.names
build = REGISTRY.build
