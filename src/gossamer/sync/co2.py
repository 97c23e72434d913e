"""Co2: local steps, and an exchange that takes the whole next round, so that nobody ever waits for it.

Equations (round t of H steps, island i):
    D_t = sum_i w_i (x_t - x_{i,t})   is under way during round t + 1
    x_{t+1} = outer(x_t, D_{t-1}),  and every island starts its round t + 1 there
Symbols: x_t global parameters at the start of round t; x_{i,t} where island i has come to in it; w_i samples seen.
Wire:    every H steps what `exchange` sends of one pseudo-gradient, hidden where it takes less than H steps.
State:   the global parameters, what `outer_optimizer` keeps, and the pseudo-gradient under way, each as large as the
model.
Paper:   Sun et al., CO2, ICLR 2024, arXiv 2401.16265.
Good when: one exchange takes about as long as a round.   Not for: few rounds: each pseudo-gradient comes a round late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync._outer_config import SyncOverlap, SyncWarmup
from gossamer.sync.outer import OuterOptimizer
from gossamer.sync.outer.stale_momentum import StaleMomentum


@dataclass(frozen=True, slots=True, kw_only=True)
class Co2(Sync):
    """A synchronization method whose exchange overlaps with the whole next round.

    `sync_every`: steps of a round; `warmup_steps`: synchronous warm-up steps.
    """

    sync_every: int = 24
    warmup_steps: int = 0
    exchange: Exchange = field(default_factory=Dense)
    outer_optimizer: OuterOptimizer = field(default_factory=StaleMomentum)

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            sync_every=self.sync_every,
            warmup=SyncWarmup(steps=self.warmup_steps),
            overlap=SyncOverlap(delay=self.sync_every, reset_to_global=True),
            exchange=self.exchange,
            outer_optimizer=self.outer_optimizer,
        )
