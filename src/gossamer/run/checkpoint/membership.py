"""The place of a rank among those that save and restore a run: its number, the number of ranks, the islands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.slices import REPLICATED
from gossamer.store.stateful import StateSource


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of one rank among the ranks of its run, and the islands of local-update training.

    `islands`: the ranks of every island; empty in synchronous training.
    """

    rank: int
    ranks: int
    islands: tuple[tuple[int, ...], ...] = ()

    @property
    def version_of_shards(self) -> int:
        """The replica number of sharded state: the island's first rank if islands have states of their own."""
        return next((island[0] for island in self.islands if self.rank in island), REPLICATED)

    def meta(self) -> Mapping[str, Any]:
        """Return the number of ranks and the islands, as saved with every checkpoint."""
        return {"ranks": self.ranks, "islands": [list(island) for island in self.islands]}

    def has_ranks_of(self, source: StateSource) -> bool:
        """Return whether as many ranks saved the state."""
        return int(source.meta["ranks"]) == self.ranks

    def has_islands_of(self, source: StateSource) -> bool:
        """Return whether the same islands saved the state."""
        now = [list(island) for island in self.islands]
        return bool(source.meta.get("islands", now) == now)

    def check_own(self, source: StateSource, name: str) -> None:
        """Raise CheckpointMismatch if this rank has no tensor of those stored per rank, because no disk held all."""
        if not self.has_ranks_of(source) or self.rank not in source.versions(name):
            raise CheckpointMismatch(
                f"{source.label} holds the sharded state of ranks {list(source.versions(name))} of "
                f"{int(source.meta['ranks'])}, wanted rank {self.rank} of {self.ranks}: resume with "
                f"{int(source.meta['ranks'])} ranks, each on the host where it ran before"
            )
        if not self.has_islands_of(source):
            raise CheckpointMismatch(
                f"{source.label} holds the sharded state of the islands {source.meta['islands']} of local updates"
                f", wanted {[list(island) for island in self.islands]}: resume with the same islands, and the "
                "plan.sync that it was saved with"
            )

    def own(self, source: StateSource, name: str) -> Tensor:
        """Return this rank's tensor of those stored per rank; see `check_own`."""
        return source.read_whole(name, self.rank)
