"""Whole: every rank holds the update rule's state of all its parameters, and makes the same update as the others.

State:   8 bytes per parameter with AdamW in float32, on every rank.   Wire: nothing beside the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.sharding import Sharding


@dataclass(frozen=True, slots=True)
class NoSharding(Sharding):
    """Replicated optimizer states, gradients and parameters: plain data parallelism."""

    @property
    def is_sharded(self) -> bool:
        return False

    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        return ()

    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        return given
