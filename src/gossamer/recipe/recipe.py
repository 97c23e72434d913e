"""All methods of a run as objects, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer import loss as losses
from gossamer import optimizer as optimizer_methods
from gossamer import policy as policies
from gossamer.exchange import Exchange
from gossamer.loss import Loss
from gossamer.optimizer import Optimizer, lr_schedule
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.optimizer.lr_schedule import LRSchedule
from gossamer.policy import Policy
from gossamer.recipe.plan_methods import AUTO, PlanMethods
from gossamer.sharding import Sharding
from gossamer.spec.config import RunConfig
from gossamer.spec.method_config import told
from gossamer.spec.plan import Plan
from gossamer.sync import Sync

OPTIMIZER = "train.optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The methods that a plan and its configuration name: those of the plan, optimizer, learning rate and policy.

    `policy`: None without adaptive compression.
    """

    config: RunConfig
    methods: PlanMethods
    optimizer: Optimizer
    lr_schedule: LRSchedule
    policy: Policy | None

    @staticmethod
    def of(config: RunConfig, plan: Plan) -> Recipe:
        """Build the methods of a run. Raises BadInput for an unknown name or wrong settings of a method.

        Whether they can be combined is checked by `conflicts.check`.
        """
        return Recipe(
            config=config,
            methods=PlanMethods.of(plan),
            optimizer=optimizer_methods.build(config.train.optimizer, key=OPTIMIZER),
            lr_schedule=lr_schedule.build(config.train.lr_schedule, key="train.lr_schedule"),
            policy=policies.build(config.plan.adapt, key="plan.adapt") if config.plan.adapts else None,
        )

    @staticmethod
    def loss_of(config: RunConfig) -> Loss:
        """Build the loss of a run, which no plan changes. Raises BadInput for an unknown name or wrong settings."""
        return losses.build(config.train.loss, key="train.loss")

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self.methods.plan

    @property
    def sync(self) -> Sync:
        """Return the sync method; every_step while it is to be chosen."""
        return self.methods.sync

    @property
    def sharding(self) -> Sharding:
        """Return the sharding of model states."""
        return self.methods.sharding

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages; 1: the model is not split."""
        return self.plan.mesh.pipe

    @property
    def in_stages(self) -> bool:
        """Return whether the model is split into pipeline stages."""
        return self.plan.mesh.in_stages

    @property
    def apart_by(self) -> str:
        """Return in a phrase what keeps ranks from being replicas that meet at every step: stages, else the sync
        method.
        """
        return f"a model in {self.stages} stages" if self.in_stages else f"plan.sync {told(self.plan.sync)}"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Return the gradient exchanges, one per rule; empty if they are still to be chosen."""
        return () if self.methods.chooses_exchange else self.methods.exchange.exchanges

    @property
    def is_lossy(self) -> bool:
        """Return whether any exchange loses part of what it averages, or is left to be chosen."""
        loop, asked = self.sync.loop, self.config.plan
        met = [*self.exchanges, *([loop.exchange] if loop is not None else [])]
        chosen = asked.exchange == AUTO and not self.in_stages and self.sync.is_plain
        is_open = chosen or asked.sync == AUTO or self.policy is not None
        return is_open or not all(one.traits.lossless for one in met)

    def optimizer_with(self, fraction: float) -> Optimizer:
        """Return the optimizer as it runs on an island with this fraction of all samples.

        It is another one only where islands average second moments. Raises BadInput if the optimizer has none.
        """
        loop = self.sync.loop
        if loop is None or not loop.average_second_moments_every:
            return self.optimizer
        return CommonAdamW.around(self.optimizer, fraction)
