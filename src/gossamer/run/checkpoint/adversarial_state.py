"""The state of adversarial training in a checkpoint: "adversarial/previous/..." and "buffers", "statistics"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from gossamer.run.adversarial_step import AdversarialState
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource

_PREFIX = "adversarial/"


@dataclass(frozen=True, slots=True)
class SavedAdversarial(Stateful):
    """The weights and persistent buffers before the last step, and the second statistics of batch normalization."""

    prefixes: ClassVar[tuple[str, ...]] = (_PREFIX,)

    state: AdversarialState

    def slices(self) -> Iterator[StateSlice]:
        for name, tensor in self.state.previous.items():
            yield StateSlice.whole(f"{_PREFIX}previous/{name}", tensor, SliceCopies.REPLICATED)
        persistent = self.state.module.state_dict(keep_vars=True).keys()
        for name, tensor in self.state.previous_buffers.items():
            if name in persistent:
                yield StateSlice.whole(f"{_PREFIX}buffers/{name}", tensor, SliceCopies.PER_REPLICA)
        for name, tensor in self.state.statistics.items():
            yield StateSlice.whole(f"{_PREFIX}statistics/{name}", tensor, SliceCopies.PER_REPLICA)

    def cause(self, source: StateSource, missing: frozenset[str]) -> str:
        lacks = any(name.startswith(_PREFIX) for name in missing)
        return (
            f"{source.label} lacks states of train.adversarial, so it was saved with other settings of it: "
            "resume with the settings it was saved with"
            if lacks
            else ""
        )

    def check(self, source: StateSource) -> None:
        """Check nothing more than `wanted`."""

    @torch.no_grad()
    def restore(self, source: StateSource) -> str:
        for one in self.slices():
            one.tensor.copy_(source.read(one.where))
        return ""
