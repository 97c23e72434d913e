"""Trackers: experiment-tracking tools, fed with a run's figures. Nothing is sent unless a tracker is configured.

A tracker is a frozen configuration; `start` imports its package (an extra of this one) and returns a session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.spec.records import Record
from gossamer.spec.registry import Registry


class Session(ABC):
    """The session of one run in one tracker."""

    @abstractmethod
    def log(self, record: Record) -> None:
        """Pass on the figures that the tool can store; other records are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is pending; nothing is logged afterwards."""


class Tracker(ABC):
    """The configuration of an experiment tracker."""

    @abstractmethod
    def start(self, run_name: str, config: Mapping[str, Any], directory: Path) -> Session:
        """Begin a run. Files, if the tool writes any, go under `directory`; raises BadInput without its package."""


REGISTRY = Registry(__name__, Tracker)
names = REGISTRY.names
build = REGISTRY.build
