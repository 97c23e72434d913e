"""When replicas exchange, and what: gradients at every step, or, of islands that train apart, what has become of the
parameters in many steps: rarely, late and small.

A method says at which level the gradients of a step meet, and gives the settings of the one outer loop. The mechanics
are a `Replica`'s (buckets that fill while backward runs, the pump, the agreement before the update), those of `Apart`
(anchor, displacement, fragments, delay, what is taken over of the result) and the `Word` that passes between islands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.spec.room import Room
from gossamer.sync._apart import Apart, Landed, Moved, exchanges_of_round, traffic_of_round
from gossamer.sync._loop import Loop
from gossamer.sync._pace import Pace, by_speed
from gossamer.sync._replica import Agreement, Replica, Vote, Window, buckets_of
from gossamer.sync._word import Heard, Word

__all__ = [
    "ROOM",
    "Agreement",
    "Apart",
    "Heard",
    "Landed",
    "Loop",
    "Moved",
    "Pace",
    "Replica",
    "Sync",
    "Vote",
    "Window",
    "Word",
    "build",
    "buckets_of",
    "by_speed",
    "exchanges_of_round",
    "names",
    "traffic_of_round",
]


class Sync(ABC):
    """A frozen dataclass; everything that changes is in the Replica and in Apart."""

    def __post_init__(self) -> None:
        """Raises BadInput for settings of the outer loop that do not go together."""
        _ = self.loop

    @property
    @abstractmethod
    def loop(self) -> Loop | None:
        """The outer loop of islands that train apart; None where all gradients meet at every step."""

    def level(self, done: int) -> str:
        """Whose gradients meet in the step after `done` others: `all`, or those of an `island`."""
        return "island" if self.loop is not None and self.loop.apart(done) else "all"


ROOM: Room[Sync] = Room(__name__, Sync)
names = ROOM.names
build = ROOM.build
