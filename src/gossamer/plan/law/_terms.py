"""The method objects of a plan, built from their names and settings."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer import exchange as exchange_methods
from gossamer import optimizer as optimizer_methods
from gossamer import policy as policies
from gossamer import sharding as sharding_methods
from gossamer import sync
from gossamer.exchange import Exchange, ParameterRules
from gossamer.optimizer import Optimizer
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.policy import Policy
from gossamer.sharding import Sharding
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from gossamer.sync import Sync

RULE = "train.optimizer"
EVERY_STEP = "every_step"  # the value of auto until it is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A plan and its configuration with the methods they name: optimizer, sync, sharding, exchange, policy.

    `exchange` is None if it is still to be chosen, `policy` None without adaptive compression.
    """

    config: RunConfig
    plan: Plan
    rule: Optimizer
    sync: Sync
    sharding: Sharding
    exchange: ParameterRules[Exchange] | None
    policy: Policy | None

    @staticmethod
    def of(config: RunConfig, plan: Plan) -> Terms:
        """Build the methods of a plan. Raises BadInput for an unknown name or wrong settings of a method."""
        asked, adapts = plan.exchange, config.plan.adapt
        return Terms(
            config=config,
            plan=plan,
            rule=optimizer_methods.build(config.train.optimizer, key=RULE),
            sync=sync.build(EVERY_STEP if plan.sync == "auto" else plan.sync, key="plan.sync"),
            sharding=sharding_methods.build(plan.sharding, key="plan.sharding"),
            exchange=None if asked == "auto" else exchange_methods.rules(asked),
            policy=None if adapts == "none" else policies.build(adapts, key="plan.adapt"),
        )

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages; 1: the model is not split."""
        return self.plan.mesh.pipe

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Return the gradient exchanges, one per rule; empty if they are still to be chosen."""
        return () if self.exchange is None else self.exchange.written

    @property
    def is_lossy(self) -> bool:
        """Return whether any exchange loses part of what it averages, or is left to be chosen."""
        loop, asked = self.sync.loop, self.config.plan
        met = [*self.exchanges, *([loop.exchange] if loop is not None else [])]
        chosen = asked.exchange == "auto" and self.stages == 1 and self.sync.is_plain
        is_open = chosen or asked.sync == "auto" or self.policy is not None
        return is_open or not all(one.traits.lossless for one in met)


def rule_of(terms: Terms) -> Optimizer:
    """Return the optimizer as it runs.

    Raises BadInput if second moments are to be averaged over islands, and the optimizer has none that can be.
    """
    loop = terms.sync.loop
    return CommonAdamW.around(terms.rule, 1.0) if loop is not None and loop.average_second_moments_every else terms.rule
