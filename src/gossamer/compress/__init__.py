"""Exchanges: how the ranks come to one mean of their gradients (or of any flat buffer), one method per file.

A method is a coroutine: it yields the messages it wants on the wire and is sent back what arrived. Several rounds,
error feedback and wrappers are then ordinary Python, and the same method runs in lockstep, priced, and for real.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.spec.room import Room
from gossamer.wire.bucket import Bucket, Layout
from gossamer.wire.message import Levels, Round, Rounds, State, Traffic


class Exchange(ABC):
    """A frozen dataclass: its fields are its whole configuration; state is passed in and handed back, never mutated.

    The bucket belongs to the exchange while it runs. Only a loss-free exchange (`Outcome.kept` None) may overwrite it.
    """

    @abstractmethod
    def init(self, layout: Layout) -> State:
        """The state before the first exchange of a bucket laid out so."""

    @abstractmethod
    def run(self, x: Bucket, state: State, at: Round) -> Rounds:
        """One exchange: yields messages, is sent replies, returns the Outcome."""

    @abstractmethod
    def traffic(self, layout: Layout, levels: Levels) -> tuple[Traffic, ...]:
        """The messages `run` will send, one after the other, before anything is encoded. Pure."""


ROOM: Room[Exchange] = Room(__name__, Exchange)
names = ROOM.names
build = ROOM.build
