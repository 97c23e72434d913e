"""The state of gradient exchanges in a checkpoint, such as residuals: "exchange/<path>@<parameter>", one per rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.run.checkpoint.stored import merged
from gossamer.store.checkpoint import Checkpoint
from gossamer.sync import GradientReducer


@dataclass(frozen=True, slots=True)
class SavedExchanges:
    """The state of the exchanges of one rank's gradients."""

    replica: GradientReducer

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's state."""
        return {f"exchange/{name}": tensor for name, tensor in self.replica.states().items()}

    def restore(self, checkpoint: Checkpoint, residuals: str) -> str:
        """Restore this rank's state; return a note for the user, "" for none.

        With another number of ranks `residuals` decides: `redistribute` divides the sum of the former ranks' residuals
        evenly over the ranks, else there are none at first.
        """
        former, rank = int(checkpoint.meta["ranks"]), self.replica.rank
        names = list(self.replica.states())
        held = {n: checkpoint.replicas(f"exchange/{n}") for n in names}
        if former == self.replica.ranks and all(rank in replicas for replicas in held.values()):
            self.replica.restore({n: checkpoint.read(f"exchange/{n}", replica=rank) for n in names})
            return ""
        there = former > 1 and all(replicas == tuple(range(former)) for replicas in held.values())
        if there and residuals == "redistribute":
            self.replica.restore({n: merged(checkpoint, f"exchange/{n}", former, self.replica.ranks) for n in names})
            return f"resumed on {self.replica.ranks} ranks what {former} saved: exchange residuals were merged"
        why = "residuals_on_resume reset" if there else "not every rank's is stored here, or the exchange is another"
        return f"exchange residuals start anew ({why})" if names else ""
