"""Trackers: other people's tools, fed with a run's figures. Each is a few lines; nothing is sent unless one is named.

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
    """One run in one tracker."""

    @abstractmethod
    def log(self, record: Record) -> None:
        """Pass on what the tool has a place for; other records are passed over."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is left; nothing is logged afterwards."""


class Tracker(ABC):
    @abstractmethod
    def start(self, run_name: str, config: Mapping[str, Any], directory: Path) -> Session:
        """Begin a run. Files, if the tool writes any, go under `directory`; raises BadInput without its package."""


REGISTRY = Registry(__name__, Tracker)
names = REGISTRY.names
build = REGISTRY.build
