"""LocalSgd: islands take steps of their own and then meet in the mean of their parameters.

Equations (island i, period H):
    x_i <- x_i - step(g_i)   H times, or n_i of them ;   x_i <- sum_j w_j x_j
Symbols: n_i `local_steps`, of an island of slow machines; w_j samples that island j has seen, over those of all; g_i
mean gradient of the island, over its own labels.
Wire:    every H steps what `exchange` sends of one pseudo-gradient.   State: the global parameters, as large as the
model.
Paper:   Stich, ICLR 2019, arXiv 1805.09767; with `warmup_steps`, post-local SGD, Lin et al., ICLR 2020, arXiv
1808.07217. Update rules keep their state for themselves: nothing of it is averaged.
Good when: islands see data of one
kind.   Not for: long periods from scratch (see diloco).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync._outer_config import LocalSteps, SyncWarmup
from gossamer.sync.outer.average import Average


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgd(Sync):
    """A synchronization method that averages parameters every `sync_every` local steps.

    `warmup_steps`: synchronous warm-up steps; `local_steps`: inner steps of each island in a round, or auto: as many as
    it has time for; empty: all. `straggler_timeout_s`: seconds a round waits for late islands, once half of them are
    there; 0: without limit.
    """

    sync_every: int = 8
    warmup_steps: int = 0
    local_steps: LocalSteps = ()
    straggler_timeout_s: float = 0.0
    exchange: Exchange = field(default_factory=Dense)

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            sync_every=self.sync_every,
            warmup=SyncWarmup(steps=self.warmup_steps),
            local_steps=self.local_steps,
            straggler_timeout_s=self.straggler_timeout_s,
            exchange=self.exchange,
            outer_optimizer=Average(),
        )
