"""Sharding methods: optimizer states, gradients and parameters replicated on every rank, or sharded over ranks.

A method chooses the exchange of gradients and which of them a rank keeps. `ShardedOptimizer` updates a rank's own rows
and all-gathers those of the others. `ShardedParameters` unshards the parameters of a unit while it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange.codec import Codec
from gossamer.sharding._access_trace import trace_access
from gossamer.sharding._gather_updates import longest_message_numel
from gossamer.sharding._group_updater import GroupUpdater, UpdateProgress, UpdateTerms
from gossamer.sharding._holding import ElementBytes, Holding, RowShard, bytes_of, holdings, shapes_of
from gossamer.sharding._row_partition import RowPartition, RowRange, rows_of
from gossamer.sharding._sharded_optimizer import ShardedOptimizer, gather_traffic
from gossamer.sharding._sharded_parameters import ShardedParameters
from gossamer.sharding._tier_files import read_tiers, remove_left_over, tier_path
from gossamer.sharding._tier_layout import TierGroup, TierLayout, TierTensor
from gossamer.sharding._tier_limits import TierAccount, TierLimits
from gossamer.sharding._tier_shares import TierShares
from gossamer.sharding._tier_update import HostListener, TierUpdater, UpdateListener
from gossamer.sharding._tiered_parameters import smallest_device
from gossamer.sharding._tiered_states import TieredStates, closing_order, smallest_host
from gossamer.sharding._tile_reader import largest_tile
from gossamer.sharding._tiled_weight import TiledWeight
from gossamer.sharding._unshard_order import LEVEL, UnshardOrder, UnshardUnit, unit_traffic
from gossamer.spec.errors import bad_input
from gossamer.spec.registry import Registry

__all__ = [
    "LEVEL",
    "REGISTRY",
    "ElementBytes",
    "GroupUpdater",
    "Holding",
    "HostListener",
    "RowPartition",
    "RowRange",
    "RowShard",
    "Sharding",
    "ShardedParameters",
    "ShardedOptimizer",
    "TierAccount",
    "TierGroup",
    "TierLayout",
    "TierLimits",
    "TierShares",
    "TierTensor",
    "TierUpdater",
    "TieredStates",
    "TiledWeight",
    "UnshardOrder",
    "UnshardUnit",
    "UpdateListener",
    "UpdateProgress",
    "UpdateTerms",
    "build",
    "bytes_of",
    "closing_order",
    "gather_traffic",
    "holdings",
    "largest_tile",
    "longest_message_numel",
    "names",
    "read_tiers",
    "remove_left_over",
    "rows_of",
    "shapes_of",
    "smallest_device",
    "smallest_host",
    "tier_path",
    "trace_access",
    "unit_traffic",
]


class Sharding(ABC):
    """A sharding method: a frozen dataclass of settings.

    All mutable state is in ShardedOptimizer and ShardedParameters.
    """

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Return whether a rank holds the optimizer states of its own rows only."""

    @property
    def gives_back(self) -> bool:
        """Return whether a rank keeps only its own rows of the gradients after their exchange (ZeRO stage 2)."""
        return False

    @property
    def takes_parameters(self) -> bool:
        """Return whether a rank keeps only its own rows of the parameters, and unshards a unit to run it (ZeRO 3)."""
        return False

    @property
    def is_tiered(self) -> bool:
        """Return whether model states are in a file, and weights in memory only while their unit runs."""
        return False

    @property
    def differences(self) -> Codec | None:
        """Return the codec in which a rank sends the change of its rows; None: it sends the rows themselves."""
        return None

    @property
    def by_parameter(self) -> bool:
        """Return whether one rank has all rows of a parameter, as optimizers that are not element-wise need it."""
        return False

    @property
    def needs_islands(self) -> bool:
        """Return whether the method requires islands."""
        return False

    @abstractmethod
    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        """Return the levels along which rows are sharded, in order; empty where every rank has all rows.

        Sharded parameters are sharded along the first level only.
        """

    @abstractmethod
    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        """Return the exchange of gradients in place of `given`: a rank needs the mean of its own rows only."""

    def deal(self, levels: ProcessGroups) -> RowPartition:
        """Return the partition of rows over the ranks of these process groups."""
        return RowPartition(levels, self.path(levels), int(self.takes_parameters), self.gives_back, self.by_parameter)

    def check(self, levels: ProcessGroups) -> None:
        """Raise BadInput where the method cannot serve these process groups; called when all of them are known."""
        if self.needs_islands and "island" not in levels.groups:
            raise bad_input(
                wanted="islands of ranks, as each island holds all states",
                got="links that are equally fast, or not known",
                do="list the ranks of each island in machines.islands, or remove `island` from plan.sharding",
                key="plan.sharding",
            )


REGISTRY: Registry[Sharding] = Registry(__name__, Sharding)
names = REGISTRY.names
build = REGISTRY.build
