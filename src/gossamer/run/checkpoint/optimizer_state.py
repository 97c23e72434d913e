"""The optimizer states in a checkpoint: "optim/<slot>/<parameter>", whole or in rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.slices import rows_of
from gossamer.run.checkpoint.stored import COMMON, agreed, by_rank, speaker, starts_anew
from gossamer.sharding import ShardedOptimizer
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import Checkpoint
from gossamer.store.slices import NamedSlice, Slice

_OF_ANY_RULE = frozenset({"main", "master", "common"})  # slots that any optimizer may have


@dataclass(frozen=True, slots=True)
class OptimizerSlots:
    """The optimizer states that one rank holds."""

    states: ShardedOptimizer
    members: Membership

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer states, if they are not sharded."""
        if self.states.is_sharded:
            return {}
        return {f"optim/{slot}/{param}": tensor for slot, param, _, tensor in self.states.slots()}

    def rows(self) -> list[NamedSlice]:
        """Return this rank's rows of sharded optimizer states."""
        slots = self.states.slots() if self.states.is_sharded else ()
        whose, params = self.members.whose, self.states.params
        return [rows_of(f"optim/{slot}/{n}", params[n], rows, t, whose) for slot, n, rows, t in slots]

    def check_rule(self, checkpoint: Checkpoint, names: Collection[str], model: Collection[str]) -> None:
        """Raise CheckpointMismatch if the optimizer, and not the model, differs from the one that was saved.

        `names`: of all stored tensors; `model`: of the weights that this rank reads.
        """
        wanted = {slot for slot, *_ in self.states.slots()} - _OF_ANY_RULE
        stored = {name.split("/")[1] for name in names if name.startswith("optim/")} - _OF_ANY_RULE
        if wanted == stored or not set(model) <= set(names):
            return
        raise CheckpointMismatch(
            f"{checkpoint.folder} was trained with another update rule: this one keeps {_slots_told(wanted)} of every "
            f"parameter, that one {_slots_told(stored)}. Resume with the train.optimizer that it was saved with, or "
            "export the model and begin a run from it"
        )

    def restore_shared(self, checkpoint: Checkpoint) -> None:
        """Load states that all ranks share, as in synchronous training."""
        for name, tensor in self.tensors().items():
            tensor.copy_(agreed(checkpoint, Slice.whole(name, tuple(tensor.shape))))

    def restore_same(self, checkpoint: Checkpoint) -> None:
        """Load states of synchronous training, at the start of local updates."""
        for name, tensor in self.tensors().items():
            if not starts_anew(checkpoint, name):
                tensor.copy_(checkpoint.read(name))

    def restore_local(self, checkpoint: Checkpoint, *, goes_on: bool) -> None:
        """Load states of local-update training; `goes_on`: this island's own."""
        for name, tensor in self.tensors().items():
            if checkpoint.replicas(name) or not name.startswith(COMMON):
                tensor.copy_(self._kept(checkpoint, Slice.whole(name, tuple(tensor.shape)), goes_on=goes_on))

    def read_rows(self, checkpoint: Checkpoint, of: Slice, *, goes_on: bool) -> Tensor:
        """Return this rank's rows of a sharded state or parameter, in whichever form the checkpoint stores it."""
        is_by_rank = of.name.startswith("optim/") and by_rank(checkpoint)
        if is_by_rank or f"states/{of.name}" in checkpoint.names():
            return self.members.own(checkpoint, f"states/{of.name}")
        if of.name.startswith("optim/main/") and not checkpoint.replicas(of.name):  # equal to the parameter
            return dict(self.states.parameters())[of.name.removeprefix("optim/main/")]
        return self._kept(checkpoint, of, goes_on=goes_on)

    def _kept(self, checkpoint: Checkpoint, of: Slice, *, goes_on: bool) -> Tensor:
        """Return a slice of stored optimizer state: this island's own if islands continue, else the mean over all
        islands.
        """
        if not goes_on:
            return agreed(checkpoint, of)
        return checkpoint.read(of.name, of.start, of.size, speaker(checkpoint, of.name, self.members.rank))


def _slots_told(slots: Collection[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"
