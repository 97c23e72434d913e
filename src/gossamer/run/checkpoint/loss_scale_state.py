"""The loss scale in a checkpoint: "precision/<field>", or "island/precision/<field>" of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.stored import of_rank
from gossamer.run.loss_scale import LossScale
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.slices import REPLICATED
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource


@dataclass(frozen=True, slots=True)
class SavedLossScale(Stateful):
    """The loss scale of a run, or in local-update training of one rank's island."""

    prefixes: ClassVar[tuple[str, ...]] = ("precision/", "island/precision/")

    scaling: LossScale
    members: Membership

    def slices(self) -> Iterator[StateSlice]:
        for name, tensor in self.scaling.state().items():
            if self.members.islands:
                yield StateSlice.whole(f"island/precision/{name}", tensor, SliceCopies.PRIVATE, self.members.rank)
            else:
                yield StateSlice.whole(f"precision/{name}", tensor, SliceCopies.REPLICATED)

    def wanted(self, source: StateSource) -> Iterator[StateSlice]:
        slices = (one for one in self.slices() if one.copies is SliceCopies.REPLICATED)
        return (one for one in slices if REPLICATED in source.versions(one.where.name))

    def ignores(self, name: str) -> bool:
        return bool(self.members.islands)

    def check(self, source: StateSource) -> None:
        for name in (f"precision/{field}" for field in self.scaling.state()):
            if not source.versions(name) and not source.versions(f"island/{name}"):
                raise CheckpointMismatch(
                    f"{source.label} holds no loss scale, so it is not a checkpoint of a run: check the directory"
                )

    def restore(self, source: StateSource) -> str:
        rank = self.members.rank
        self.scaling.load({field: of_rank(source, f"precision/{field}", rank) for field in self.scaling.state()})
        return ""
