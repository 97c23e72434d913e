"""Cser: every step meets at once as far as `step_exchange` carries it; the rest stays in the island's own parameters,
and is brought together every H steps as far as `exchange` carries it (error reset, in place of error feedback).

Equations (island i, step p_i, residual e_i = x_i - a):
    x_i <- x_i - mean_j C2(p_j) - (p_i - C2(p_i)) ;   a <- a - mean_j C2(p_j)
    every H steps:  a <- a + mean_j C1(e_j) ;   x_i <- a + (e_i - C1(e_i))
Symbols: a global parameters, the same on all islands; C2 `step_exchange`, C1 `exchange`; means weighted by samples
seen. What an exchange that encodes twice has lost of the others at an island without samples stays there, for islands
that weigh alike when they next meet.
Wire:    per step what `step_exchange` sends of the model, and every H steps what `exchange` does.   State: the global
parameters and where the island was before the step, each as large as the model.
Paper:   Xie et al., CSER, NeurIPS 2020, arXiv 2007.13221. There C1 and C2 are random blocks (random_blocks here), and
the step that of SGD; here it is whatever the update rule makes of the island's gradient.
Good when: compressed very hard: nothing is held back, so nothing comes late.   Not for: sharded parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.exchange import Exchange
from gossamer.exchange.random_blocks import RandomBlocks
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync._outer_config import SyncWarmup
from gossamer.sync.outer.average import Average


@dataclass(frozen=True, slots=True, kw_only=True)
class Cser(Sync):
    """A synchronization method with error reset: parameters keep compression errors, averaged every `sync_every` steps.

    `step_exchange: null` is the same without the partial synchronization of steps; exchange: dense leaves no residual.
    """

    sync_every: int = 8
    exchange: Exchange = field(default_factory=lambda: RandomBlocks(fraction=1 / 4))
    step_exchange: Exchange | None = field(default_factory=lambda: RandomBlocks(fraction=1 / 32))
    warmup_steps: int = 0

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            sync_every=self.sync_every,
            warmup=SyncWarmup(steps=self.warmup_steps),
            error_reset=True,
            step_exchange=self.step_exchange,
            exchange=self.exchange,
            outer_optimizer=Average(),
        )
