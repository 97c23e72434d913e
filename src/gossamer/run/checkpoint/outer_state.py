"""The state of local-update training in a checkpoint: "outer/..." of all ranks, "island/..." of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.optimizer_state import OptimizerSlots
from gossamer.run.checkpoint.stored import merged, was_apart
from gossamer.run.goal import Progress
from gossamer.store.checkpoint import Checkpoint
from gossamer.sync import OuterLoop


@dataclass(frozen=True, slots=True)
class OuterState:
    """The state of one rank's outer loop, with its progress. All of it is empty in synchronous training."""

    apart: OuterLoop
    members: Membership
    progress: Progress

    def shared(self) -> dict[str, Tensor]:
        """Return the state that all ranks share, besides the global parameters."""
        return {f"outer/{name}": tensor for name, tensor in self.apart.shared().items()}

    def own(self) -> dict[str, Tensor]:
        """Return the local state of this rank."""
        return {f"island/{name}": tensor for name, tensor in self.apart.own().items()}

    def updates(self) -> dict[str, Tensor]:
        """Return the number of updates of this rank's island."""
        return {"island/updates": torch.tensor(self.progress.updates)}

    def goes_on(self, checkpoint: Checkpoint) -> bool:
        """Return whether local-update training continues with the same islands and all stored state of this rank's
        island.
        """
        if not self.apart.fragments or not was_apart(checkpoint):
            return False
        same = self.members.has_ranks_of(checkpoint) and self.members.has_islands_of(checkpoint)
        return same and all(self.members.rank in replicas for replicas in self._own_there(checkpoint).values())

    def _own_there(self, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        """Return the ranks whose local state of local-update training is stored, by tensor name."""
        under_way = (n.removeprefix("island/") for n in checkpoint.names() if n.startswith("island/left/"))
        return {n: checkpoint.replicas(f"island/{n}") for n in (*self.apart.own(), *under_way)}

    def restore_shared(self, checkpoint: Checkpoint) -> None:
        """Load the state that all ranks share, if the checkpoint is of local-update training."""
        for name, tensor in self.shared().items():
            if was_apart(checkpoint):
                tensor.copy_(checkpoint.read(name))

    def restore(self, checkpoint: Checkpoint, slots: OptimizerSlots, residuals: str, *, goes_on: bool) -> str:
        """Restore the state of local-update training and its optimizer states; return a note for the user.

        With other islands than before, all start from the global parameters and the mean of the optimizer states.
        """
        if not self.apart.fragments:
            return ""
        former, rank, ranks = int(checkpoint.meta["ranks"]), self.members.rank, self.members.ranks
        if not was_apart(checkpoint):
            slots.restore_same(checkpoint)
            self.apart.part()
            return "the islands part from what all ranks had trained together; "
        shared = {n.removeprefix("outer/"): checkpoint.read(n) for n in checkpoint.names() if n.startswith("outer/")}
        there = self._own_there(checkpoint)
        slots.restore_local(checkpoint, goes_on=goes_on)
        if goes_on:
            self.progress.updates = int(checkpoint.read("island/updates", replica=rank))
            self.apart.restore(shared, {n: checkpoint.read(f"island/{n}", replica=rank) for n in there})
            return ""
        owed = [n for n in there if n.startswith(("rounds/", "steps/")) and there[n] == tuple(range(former))]
        kept = {n: merged(checkpoint, f"island/{n}", former, ranks) for n in owed if residuals == "redistribute"}
        self.apart.restore(shared, kept)
        return f"resumed on {ranks} ranks what {former} saved: all islands start from what they had agreed on; "
