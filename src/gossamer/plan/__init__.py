"""Planners: from a configuration and what is known of model and machines to a plan. Pure: no device, no process.

One planner per file. `auto` in a configuration is always resolved here, and every decision leaves a reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from gossamer.spec.room import Room


@dataclass(frozen=True, slots=True)
class Request:
    """What a planner is asked. `shapes` are the trainable parameters in the model's order, when they are known."""

    config: RunConfig
    ranks: int
    device: str = "cpu"
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Planner(ABC):
    """A frozen dataclass with one question to answer."""

    @abstractmethod
    def plan(self, request: Request) -> Plan:
        """The plan; raises BadInput for what cannot be planned, NoPlan where nothing fits."""


ROOM: Room[Planner] = Room(__name__, Planner)
names = ROOM.names
build = ROOM.build
