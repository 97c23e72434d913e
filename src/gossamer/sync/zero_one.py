"""ZeroOne: all gradients meet in fewer and fewer steps; between them what one step has moved meets in one bit a number,
and later what many steps have.

Equations (island i, kappa = `var_update_scaler`, T = `var_freeze_step`, A the common point, x_i where island i came to
from there):
    t < T:   all gradients meet in step t_j, t_{j+1} - t_j = 2^floor(j / kappa);  every other step is a round
    t >= T:  rounds of 1 step, then of 2, 4, ... `local_step_clipper`: twice as long after every `local_step_scaler`
    steps
    round:   A <- A - exchange(A - x_i) ;   x_i <- A
Wire:    in a step in which all gradients meet, what plan.exchange sends; in a round, what `exchange` does.
State:   the global parameters and a residual, each as large as the model.
Paper:   Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023, arXiv
2202.06009: with zero_one_adam as the rule, its second moment is refreshed in the steps t_j, and its momentum is what
comes of a round. kappa 16, `local_step_clipper` 16 and `local_step_scaler` 32678 there, T where the rate has warmed up.
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
from gossamer.spec.errors import bad_input
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync._outer_config import SyncWarmup
from gossamer.sync.outer.average import Average


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOne(Sync):
    """A synchronization method with synchronous steps that get rarer and compressed local-step rounds that get longer.

    `var_freeze_step`: warm-up steps, say a fifth of the run. With `var_update_scaler: 0`, all gradients are averaged in
    all steps until then.
    """

    local_step_clipper: int = 16
    var_freeze_step: int = 500
    var_update_scaler: int = 16
    local_step_scaler: int = 500
    exchange: Exchange = field(default_factory=lambda: ErrorFeedback(TwoShot(Sign())))

    def __post_init__(self) -> None:
        for name, least in (("local_step_clipper", 1), ("var_freeze_step", 0)):
            if (given := getattr(self, name)) < least:
                do = f"give {least} or more, or remove {name} to use its default"
                raise bad_input(wanted=f"{least} or more steps", got=str(given), do=do, key=name)
        Sync.__post_init__(self)

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            sync_every=self.local_step_clipper,
            warmup=SyncWarmup(
                steps=self.var_freeze_step,
                var_update_scaler=self.var_update_scaler,
                local_step_scaler=self.local_step_scaler,
            ),
            exchange=self.exchange,
            outer_optimizer=Average(),
        )
