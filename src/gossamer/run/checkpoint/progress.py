"""The progress of a run in a checkpoint: metadata, and "island/updates" of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.outer_loop_state import OuterLoopState
from gossamer.run.goal import Progress
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource

_UPDATES = "island/updates"


@dataclass(frozen=True, slots=True)
class SavedProgress(Stateful):
    """The steps of a run that are done, and the updates made; in local-update training those of the rank's island."""

    prefixes: ClassVar[tuple[str, ...]] = (_UPDATES,)

    progress: Progress
    members: Membership
    outer: OuterLoopState

    def slices(self) -> Iterator[StateSlice]:
        if self.outer.is_apart:
            yield StateSlice.whole(
                _UPDATES, torch.tensor(self.progress.updates), SliceCopies.PRIVATE, self.members.rank
            )

    def meta(self) -> Mapping[str, Any]:
        return {"step": self.progress.step, "updates": self.progress.updates}

    def check(self, source: StateSource) -> None:
        if self.outer.goes_on(source) and self.members.rank not in source.versions(_UPDATES):
            rank = self.members.rank
            raise CheckpointMismatch(f"{source.label} holds no {_UPDATES} of rank {rank}: copy that rank's files to it")

    def restore(self, source: StateSource) -> str:
        self.progress.step, self.progress.updates = int(source.meta["step"]), int(source.meta["updates"])
        if self.outer.goes_on(source):
            self.progress.updates = int(source.read_whole(_UPDATES, self.members.rank))
        return ""
