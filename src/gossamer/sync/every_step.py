"""EveryStep: all replicas exchange every step's gradients; the update is that of one process with the whole batch.

Equations:
    g = sum_r w_r g_r,   w_r = (valid labels of rank r) / (valid labels of all ranks)
Symbols: g_r mean gradient of rank r over its own labels.
Wire:    one gather of 8 bytes per rank, then per bucket what the exchange sends.   State: the exchange's.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.sync import OuterLoopConfig, Sync


@dataclass(frozen=True, slots=True)
class EveryStep(Sync):
    """Synchronous data parallelism: all ranks average their gradients at every step."""

    @property
    def loop(self) -> OuterLoopConfig | None:
        return None
