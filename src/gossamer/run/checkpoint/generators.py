"""The states of random-number generators in a checkpoint: "rng/torch", one per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from gossamer.run.checkpoint.membership import Membership
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource

_TORCH = "rng/torch"


@dataclass(frozen=True, slots=True)
class Generators(Stateful):
    """The random-number generator of one rank's process; with another number of ranks it starts anew."""

    prefixes: ClassVar[tuple[str, ...]] = ("rng/",)

    members: Membership

    def slices(self) -> Iterator[StateSlice]:
        yield StateSlice.whole(_TORCH, torch.get_rng_state(), SliceCopies.PRIVATE, self.members.rank)

    def check(self, source: StateSource) -> None:
        if self.members.has_ranks_of(source) and self.members.rank not in source.versions(_TORCH):
            raise CheckpointMismatch(
                f"{source.label} holds {_TORCH} of ranks {list(source.versions(_TORCH))}, wanted rank "
                f"{self.members.rank}: resume each rank on the host where it ran before"
            )

    def restore(self, source: StateSource) -> str:
        if self.members.has_ranks_of(source):
            torch.set_rng_state(source.read_whole(_TORCH, self.members.rank))
        return ""
