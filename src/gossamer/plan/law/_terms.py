"""The objects that the words of a plan stand for."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer import exchange as exchange_methods
from gossamer import optimizer as optimizer_methods
from gossamer import sharding as sharding_methods
from gossamer import sync
from gossamer.exchange import Exchange, ParameterRules
from gossamer.optimizer import Optimizer
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.plan import adapt
from gossamer.plan.adapt import Policy
from gossamer.sharding import Sharding
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from gossamer.sync import Sync

RULE = "train.optimizer"
EVERY_STEP = "every_step"  # what auto stands for until it is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A plan with its configuration, and what their words stand for.

    `exchange` is None where it is still to be chosen, `policy` where nothing is adapted.
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
        """Raises BadInput for a word that names no method, or a method with other parameters."""
        asked, adapts = plan.exchange, config.plan.adapt
        return Terms(
            config=config,
            plan=plan,
            rule=optimizer_methods.build(config.train.optimizer, key=RULE),
            sync=sync.build(EVERY_STEP if plan.sync == "auto" else plan.sync, key="plan.sync"),
            sharding=sharding_methods.build(plan.states, key="plan.states"),
            exchange=None if asked == "auto" else exchange_methods.rules(asked),
            policy=None if adapts == "none" else adapt.build(adapts, key="plan.adapt"),
        )

    @property
    def stages(self) -> int:
        """How many the model is cut into; 1: it is whole."""
        return self.plan.mesh.pipe

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Of gradients, one for every line that is written; none where they are still to be chosen."""
        return () if self.exchange is None else self.exchange.written

    @property
    def is_lossy(self) -> bool:
        """Whether anything that meets may be less than what was to meet, or is left to be chosen."""
        loop, asked = self.sync.loop, self.config.plan
        met = [*self.exchanges, *([loop.exchange] if loop is not None else [])]
        chosen = asked.exchange == "auto" and self.stages == 1 and self.sync.is_plain
        is_open = chosen or asked.sync == "auto" or self.policy is not None
        return is_open or not all(one.traits.lossless for one in met)


def rule_of(terms: Terms) -> Optimizer:
    """The update rule as it runs. Raises BadInput where islands cannot bring together what it knows, as they should."""
    loop = terms.sync.loop
    return CommonAdamW.around(terms.rule, 1.0) if loop is not None and loop.second_moments else terms.rule
