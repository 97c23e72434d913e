"""ZeroOne: all gradients meet in fewer and fewer steps; between them what one step has moved meets in one bit a number,
and later what many steps have.

Equations (island i, kappa = spaced, T = start, A the common point, x_i where island i came to from there):
    t < T:   all gradients meet in step t_j, t_{j+1} - t_j = 2^floor(j / kappa);  every other step is a round
    t >= T:  rounds of 1 step, then of 2, 4, ... `every`: twice as long after every `doubles` steps
    round:   A <- A - exchange(A - x_i) ;   x_i <- A
Wire:    in a step in which all gradients meet, what plan.exchange sends; in a round, what `exchange` does.
State:   the anchor and a residual, each as large as the model.
Paper:   Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023, arXiv
2202.06009: with zero_one_adam as the rule, its second moment is refreshed in the steps t_j, and its momentum is what
comes of a round. kappa 16, every 16 and doubles 32678 there, T where the rate has warmed up.
Unlike the paper: the code sees what parameters have moved by, and not that times the root of the second moment: in each
block of it all numbers are of about one size. A step in which all gradients meet is not a round as well.
Good when: latency and bytes both count.   Not for: too early a T: from there on the second moment stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.exchange import Exchange
from gossamer.exchange.codec.sign import Sign
from gossamer.exchange.error_feedback import ErrorFeedback
from gossamer.exchange.two_shot import TwoShot
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync.outer.average import Average


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOne(Sync):
    """A synchronization method with synchronous steps that get rarer and compressed local-step rounds that get longer.

    `start`: warm-up steps, say a fifth of the run. With spaced: 0, all gradients are averaged in all steps until then.
    """

    every: int = 16
    start: int = 500
    spaced: int = 16
    doubles: int = 500
    exchange: Exchange = field(default_factory=lambda: ErrorFeedback(TwoShot(Sign())))

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            every=self.every,
            start=self.start,
            spaced=self.spaced,
            doubles=self.doubles,
            exchange=self.exchange,
            rule=Average(),
        )
