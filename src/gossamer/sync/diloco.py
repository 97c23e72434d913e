"""Diloco: many steps of the inner optimizer per island, then one outer step on the mean displacement.

Equations (island i, fragment p of P, period H, delay tau):
    x_i <- inner(x_i, g_i)   at every step, or n_i of H
    every H steps, fragment p (H p / P) steps after the first:  D_p = sum_i w_i (a_p - x_{i,p})
    tau steps later:  a_p <- outer(a_p, D_p) ;   x_{i,p} <- mix x_{i,p} + (1 - mix) (a_p + c_{i,p})
Symbols: a anchor; w_i samples that island i has seen, over those of all; n_i `steps`, of an island of slow machines; c
what x_{i,p} has moved by since D_p was sent, where `carry` is set, else 0: then tau steps are lost but for the mix.
Wire:    every H / P steps what `exchange` sends of one fragment: P fragments need 1 / P of the peak rate, and tau steps
of time hide what they send.   State: the anchor and what `outer` keeps, each as large as the model.
Paper:   Douillard et al., DiLoCo, arXiv 2311.08105; Douillard et al., Streaming DiLoCo, arXiv 2501.18512 (fragments,
delay, mix, 4-bit displacements); `carry` as in the delayed averaging of Zhou et al., DaSGD, arXiv 2006.00441.
Good when: the line between islands is slow.   Not for: the first hundreds of steps from scratch: let the islands train
together for `start` steps.   Tied weights lie in one fragment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync._outer_config import LocalSteps
from gossamer.sync.outer import OuterOptimizer
from gossamer.sync.outer.nesterov import Nesterov


@dataclass(frozen=True, slots=True, kw_only=True)
class Diloco(Sync):
    """A synchronization method with local steps and an outer optimizer step on the mean pseudo-gradient, by fragment.

    One fragment without delay is DiLoCo; `streaming_diloco` sets the others as its paper does. `steps`: inner steps of
    each island in a round of `every`, or auto: as many as it has time for; empty: all. `second_moments`: every so many
    rounds islands also average the second moments that AdamW divides by (optimizer.common_adamw), one byte per number;
    0: never. `patience_s`: seconds a round waits for late islands, once half of them are there; 0: without limit.
    """

    every: int = 50
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    carry: bool = False
    start: int = 0
    steps: LocalSteps = ()
    second_moments: int = 0
    patience_s: float = 0.0
    exchange: Exchange = field(default_factory=Dense)
    outer: OuterOptimizer = field(default_factory=Nesterov)

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            every=self.every,
            fragments=self.fragments,
            delay=self.delay,
            mix=self.mix,
            carries=self.carry,
            start=self.start,
            steps=self.steps,
            second_moments=self.second_moments,
            patience_s=self.patience_s,
            exchange=self.exchange,
            rule=self.outer,
        )
