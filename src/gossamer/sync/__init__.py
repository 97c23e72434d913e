"""When replicas exchange, and what: every step (here), later local steps, outer loops and gossip.

A method decides what crosses the wire in a step; the mechanics (buckets that fill while backward runs, the pump,
the agreement before the update) are a `Replica`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.spec.room import Room
from gossamer.sync._replica import Agreement, Replica, Vote, Window, buckets_of

__all__ = ["ROOM", "Agreement", "Replica", "Sync", "Vote", "Window", "build", "buckets_of", "names"]


class Sync(ABC):
    """A frozen dataclass; everything that changes is in the Replica."""

    @abstractmethod
    def open(self, replica: Replica, window: Window) -> None:
        """Before the first forward of a step: declare what will be sent in it."""

    @abstractmethod
    def reduce(self, replica: Replica) -> None:
        """After the last backward: gradients become what the update rule is to see."""


ROOM: Room[Sync] = Room(__name__, Sync)
names = ROOM.names
build = ROOM.build
