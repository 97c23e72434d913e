"""Where the update rule's state lies: on every rank, or a part on each of the ranks that hold the same parameters.

A method says how gradients meet and whose rows of a parameter are whose; the mechanics are `States`' (the update of
one's own rows, the gather of everybody's).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gossamer.compress import Exchange
from gossamer.compress.codec import Codec
from gossamer.memory._rows import Deal, Rows, rows_of
from gossamer.memory._states import States, gather_traffic
from gossamer.spec.errors import bad_input
from gossamer.spec.room import Room
from gossamer.wire.message import Levels

__all__ = ["ROOM", "Deal", "Rows", "Sharding", "States", "build", "gather_traffic", "names", "rows_of"]


class Sharding(ABC):
    """A frozen dataclass; everything that changes is in States."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether a rank holds the state of its own rows alone."""

    @property
    def weights(self) -> Codec | None:
        """How what a rank has moved its rows by gets to the others; None: the rows themselves do, as they are."""
        return None

    @property
    def needs_islands(self) -> bool:
        """Whether it makes no sense on links that are all alike."""
        return False

    @abstractmethod
    def path(self, levels: Levels) -> tuple[str, ...]:
        """Along which levels rows are dealt out; along none, where every rank has all."""

    @abstractmethod
    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        """How gradients meet that `given` was asked for: a rank needs the mean of its own rows alone."""

    def check(self, levels: Levels) -> None:
        """Raises BadInput where this cannot serve such a wire: asked when all is known of it."""
        if self.needs_islands and "island" not in levels.groups:
            raise bad_input(
                wanted="islands of ranks, to hold the states on each of them",
                got="links that are all alike, or not known",
                do="say in machines.islands which ranks share a fast link, or leave level at all",
                key="plan.states",
            )


ROOM: Room[Sharding] = Room(__name__, Sharding)
names = ROOM.names
build = ROOM.build
