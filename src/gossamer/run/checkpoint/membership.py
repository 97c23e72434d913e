"""The place of a rank among those that save and restore a run: its number, the number of ranks, the islands."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import Checkpoint
from gossamer.store.slices import REPLICATED
from gossamer.sync import GradientReducer, OuterLoop


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of one rank among the ranks and islands of its run."""

    replica: GradientReducer
    apart: OuterLoop

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return self.replica.rank

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.replica.ranks

    @property
    def islands(self) -> list[list[int]]:
        """Return the ranks of every island in local-update training; an empty list in synchronous training."""
        return [list(island) for island in self.replica.levels.groups["island"]] if self.apart.fragments else []

    @property
    def whose(self) -> int:
        """Return the replica number of sharded state: the island's first rank if islands have states of their own."""
        return next((island[0] for island in self.islands if self.rank in island), REPLICATED)

    def has_ranks_of(self, checkpoint: Checkpoint) -> bool:
        """Return whether as many ranks saved the checkpoint."""
        return int(checkpoint.meta["ranks"]) == self.ranks

    def has_islands_of(self, checkpoint: Checkpoint) -> bool:
        """Return whether the same islands saved the checkpoint."""
        return bool(checkpoint.meta.get("islands", self.islands) == self.islands)

    def own(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """Return this rank's tensor of those that were stored per rank, because no disk held all of it."""
        if not self.has_ranks_of(checkpoint) or self.rank not in checkpoint.replicas(name):
            raise CheckpointMismatch(
                f"{checkpoint.folder} holds the sharded state of ranks {list(checkpoint.replicas(name))} of "
                f"{int(checkpoint.meta['ranks'])}, wanted rank {self.rank} of {self.ranks}: resume with as many ranks, "
                "each on the host where it was"
            )
        if not self.has_islands_of(checkpoint):
            raise CheckpointMismatch(
                f"{checkpoint.folder} holds the rows of each rank where islands apart were {checkpoint.meta['islands']}"
                f", wanted {self.islands}: resume with the same islands, and the plan.sync that it was saved with"
            )
        return checkpoint.read(name, replica=self.rank)
