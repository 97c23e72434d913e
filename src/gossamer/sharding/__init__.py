"""Where the update rule's state lies: on every rank, or a part on each of the ranks that train the same parameters; and
gradients and the parameters themselves likewise.

A method says how gradients meet and what of them stays; the mechanics are those of `ShardedOptimizer` (the update of
one's own rows, the gather of everybody's) and those of `ShardedParameters` (parameters that are there while a unit of
the model runs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange.codec import Codec
from gossamer.sharding._access_trace import trace_access
from gossamer.sharding._gather_updates import longest
from gossamer.sharding._row_partition import RowPartition, RowRange, rows_of
from gossamer.sharding._sharded_optimizer import ShardedOptimizer, gather_traffic
from gossamer.sharding._sharded_parameters import ShardedParameters
from gossamer.sharding._unshard_order import LEVEL, UnshardOrder
from gossamer.spec.errors import bad_input
from gossamer.spec.registry import Registry

__all__ = [
    "LEVEL",
    "REGISTRY",
    "RowPartition",
    "RowRange",
    "Sharding",
    "ShardedParameters",
    "ShardedOptimizer",
    "UnshardOrder",
    "build",
    "gather_traffic",
    "longest",
    "names",
    "rows_of",
    "trace_access",
]


class Sharding(ABC):
    """A frozen dataclass; everything that changes is in States."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether a rank holds the state of its own rows alone."""

    @property
    def gives_back(self) -> bool:
        """Whether a rank keeps its own rows of the gradients alone, once they have been exchanged."""
        return False

    @property
    def takes_parameters(self) -> bool:
        """Whether a rank holds its own rows of the parameters alone, and the others' while a unit runs."""
        return False

    @property
    def differences(self) -> Codec | None:
        """How what a rank has moved its rows by gets to the others; None: the rows themselves do, as they are."""
        return None

    @property
    def needs_islands(self) -> bool:
        """Whether it makes no sense on links that are all alike."""
        return False

    @abstractmethod
    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        """Along which levels rows are dealt out; along none, where every rank has all. Sharded parameters are dealt
        out along the first of them.
        """

    @abstractmethod
    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        """How gradients meet that `given` was asked for: a rank needs the mean of its own rows alone."""

    def deal(self, levels: ProcessGroups) -> RowPartition:
        """Whose rows are whose, where the links have these levels."""
        return RowPartition(levels, self.path(levels), kept=int(self.takes_parameters))

    def check(self, levels: ProcessGroups) -> None:
        """Raises BadInput where this cannot serve such a wire: asked when all is known of it."""
        if self.needs_islands and "island" not in levels.groups:
            raise bad_input(
                wanted="islands of ranks, to hold the states on each of them",
                got="links that are all alike, or not known",
                do="say in machines.islands which ranks share a fast link, or leave `island` out of plan.states",
                key="plan.states",
            )


REGISTRY: Registry[Sharding] = Registry(__name__, Sharding)
names = REGISTRY.names
build = REGISTRY.build
