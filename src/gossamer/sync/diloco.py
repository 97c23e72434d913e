"""Diloco: many steps of the inner optimizer per island, then one outer step on the mean pseudo-gradient.

Equations (island i, fragment p of P, period H, delay tau):
    x_i <- inner(x_i, g_i)   at every step, or n_i of H
    every H steps, fragment p (H p / P) steps after the first:  D_p = sum_i w_i (a_p - x_{i,p})
    tau steps later:  a_p <- outer(a_p, D_p) ;   x_{i,p} <- alpha x_{i,p} + (1 - alpha) (a_p + c_{i,p})
Symbols: a global parameters; w_i samples that island i has seen, over those of all; n_i `local_steps`, of an island of
slow machines; c what x_{i,p} has moved by since D_p was sent, where `keep_local_progress` is set, else 0: then tau
steps are lost but for alpha's part.
Wire:    every H / P steps what `exchange` sends of one fragment: P fragments need 1 / P of the peak rate, and tau steps
of time hide what they send.   State: the global parameters and what `outer_optimizer` keeps, each as large as the
model.
Paper:   Douillard et al., DiLoCo, arXiv 2311.08105; Douillard et al., Streaming DiLoCo, arXiv 2501.18512 (fragments,
delay, alpha, 4-bit pseudo-gradients); `keep_local_progress` as in the delayed averaging of Zhou et al., DaSGD, arXiv
2006.00441.
Good when: the line between islands is slow.   Not for: the first hundreds of steps from scratch: let the
islands train together for `warmup_steps` steps.   Tied weights lie in one fragment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync._outer_config import LocalSteps, SyncOverlap, SyncWarmup
from gossamer.sync.outer import OuterOptimizer
from gossamer.sync.outer.nesterov import Nesterov


@dataclass(frozen=True, slots=True, kw_only=True)
class Diloco(Sync):
    """A synchronization method with local steps and an outer optimizer step on the mean pseudo-gradient, by fragment.

    One fragment without delay is DiLoCo; `streaming_diloco` sets the others as its paper does. `local_steps`: inner
    steps of each island in a round of `sync_every`, or auto: as many as it has time for; empty: all.
    `average_second_moments_every`: every so many rounds islands also average the second moments that AdamW divides by
    (optimizer.common_adamw), one byte per number;
    0: never. `straggler_timeout_s`: seconds a round waits for late islands, once half of them are there; 0: without
    limit.
    """

    sync_every: int = 50
    fragments: int = 1
    sync_delay: int = 0
    alpha: float = 0.0
    keep_local_progress: bool = False
    warmup_steps: int = 0
    local_steps: LocalSteps = ()
    average_second_moments_every: int = 0
    straggler_timeout_s: float = 0.0
    exchange: Exchange = field(default_factory=Dense)
    outer_optimizer: OuterOptimizer = field(default_factory=Nesterov)

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            sync_every=self.sync_every,
            fragments=self.fragments,
            overlap=SyncOverlap(delay=self.sync_delay, alpha=self.alpha, keep_local_progress=self.keep_local_progress),
            warmup=SyncWarmup(steps=self.warmup_steps),
            local_steps=self.local_steps,
            average_second_moments_every=self.average_second_moments_every,
            straggler_timeout_s=self.straggler_timeout_s,
            exchange=self.exchange,
            outer_optimizer=self.outer_optimizer,
        )
