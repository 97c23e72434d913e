"""The methods that a plan names, as objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gossamer import saver as saver_methods
from gossamer import sharding as sharding_methods
from gossamer import sync as sync_methods
from gossamer.exchange import Exchange
from gossamer.p2p import activation
from gossamer.p2p.activation import ActivationCodec
from gossamer.pipeline import schedule
from gossamer.pipeline.recomputed import Recomputed
from gossamer.pipeline.schedule import PipelineSchedule
from gossamer.recipe.parameter_rules import ParameterRules
from gossamer.saver import Saver
from gossamer.sharding import RowPartition, Sharding
from gossamer.spec.config import PlanSection
from gossamer.spec.plan import Plan
from gossamer.spec.row_range import parts_in
from gossamer.sync import Sync

AUTO = "auto"
EVERY_STEP = "every_step"  # of plan.sync, until it is chosen
ALL_REDUCE = "dense"  # of plan.exchange, until it is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMethods:
    """The methods that a plan names: sync, sharding, exchange by parameter, pipeline schedule, activation compression,
    savers.

    For a key that is still `auto`, every_step and dense stand in; `chooses_sync` and `chooses_exchange` say so.
    `activation`: one codec per stage boundary.
    """

    plan: Plan
    sync: Sync
    sharding: Sharding
    exchange: ParameterRules
    schedule: PipelineSchedule
    activation: tuple[ActivationCodec, ...]
    savers: tuple[Saver, ...]

    @staticmethod
    def of(plan: Plan) -> PlanMethods:
        """Build the methods of a plan. Raises BadInput for an unknown name or wrong settings of a method."""
        written = plan.activation_compression
        each = written if isinstance(written, tuple) else (written,) * (plan.mesh.pipe - 1)
        savers = tuple(saver_methods.build(one, key="plan.savers") for one in plan.savers)
        order = schedule.build(plan.pipeline_schedule, key="plan.pipeline_schedule")
        again = plan.mesh.in_stages and any(saver.recomputes_stages for saver in savers)
        return PlanMethods(
            plan=plan,
            sync=sync_methods.build(EVERY_STEP if plan.sync == AUTO else plan.sync, key="plan.sync"),
            sharding=sharding_methods.build(plan.sharding, key="plan.sharding"),
            exchange=ParameterRules.read(
                ALL_REDUCE if plan.exchange == AUTO else plan.exchange, parts=parts_in(plan.buckets)
            ),
            schedule=Recomputed(order) if again else order,
            activation=tuple(activation.build(one, key="plan.activation_compression") for one in each),
            savers=savers,
        )

    @staticmethod
    def asked(section: PlanSection) -> PlanMethods:
        """Build the sync method, sharding and exchange that a configuration asks for, before there is a plan.

        Raises BadInput as `of` does.
        """
        words = {"sync": section.sync, "sharding": section.sharding, "exchange": section.exchange}
        return PlanMethods.of(Plan(rows=(1,), microbatches=(1,)).model_copy(update=words))

    def under(self, **words: Any) -> PlanMethods:
        """Return the methods of the plan with other values of these fields: a candidate, or what a policy chose."""
        return PlanMethods.of(self.plan.model_copy(update=words))

    @property
    def chooses_sync(self) -> bool:
        """Return whether the sync method is still to be chosen."""
        return bool(self.plan.sync == AUTO)

    @property
    def chooses_exchange(self) -> bool:
        """Return whether the exchange is still to be chosen."""
        return bool(self.plan.exchange == AUTO)

    def exchanges(self, names: Iterable[str], deal: RowPartition) -> dict[str, Exchange]:
        """Return the exchange of every parameter, which delivers to the ranks that own its optimizer states.

        Raises BadInput for a line of plan.exchange that serves none of them.
        """
        return {name: self.sharding.exchange(one, deal.path) for name, one in self.exchange.by_name(names).items()}
