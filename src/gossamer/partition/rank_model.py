"""Build a rank's part of the model: the full model, or the pipeline stages that the plan places on this rank.

Every rank traces the model without its weights, finds the same split points, and builds only its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from gossamer import recipe
from gossamer.model.compiled import compile_units
from gossamer.model.precision import precision_of
from gossamer.model.split.constructor_state import (
    Readers,
)
from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.segments import with_segments
from gossamer.model.split.split_points import SplitPoints, StageSpec, stage_specs
from gossamer.model.split.stage import StageModule
from gossamer.model.step_dependent import check_subnets
from gossamer.model.unit_config import check_open, check_units, units_of
from gossamer.partition.forecast import bubble_reason, forecast_of
from gossamer.partition.model_provider import ModelProvider
from gossamer.partition.plan_file import make_plan
from gossamer.partition.request import PartitionRequest
from gossamer.partition.saver_choice import with_recomputed_units
from gossamer.partition.split_choice import check_cuts, other_than_planned, split_points
from gossamer.partition.stage_memory import check_room, check_shared_memory
from gossamer.pipeline.from_plan import schedule_of
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Feed
from gossamer.run.staged_model import Forward, StagedModel
from gossamer.spec.config import RunConfig
from gossamer.spec.method_config import Written
from gossamer.spec.plan import Plan
from gossamer.spec.unread_keys import in_stages


@dataclass(frozen=True, slots=True)
class RankModel:
    """The module of one rank and the plan; `cut` describes its pipeline stages if it is not the full model."""

    plan: Plan
    module: nn.Module
    cut: StagedModel | None = None


@dataclass(frozen=True, slots=True)
class StagedOutline:
    """A model in pipeline stages before any stage is built: plan, split points and trace, equal on all ranks."""

    plan: Plan
    cut: StagedModel
    flow: DataFlow  # of the first micro-batch
    units_of: Callable[[nn.Module], tuple[str, ...]]  # of this model, whoever built it


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned model before this rank's part is built. Without stages, every rank already has the full module."""

    source: ModelProvider
    asked: PartitionRequest
    plan: Plan
    module: nn.Module | None
    outlined: StagedOutline | None

    @property
    def outline(self) -> RankModel:
        """Return the model as far as it is known.

        With pipeline stages, that is the full model without parameter values, and none of this rank's stages.
        """
        if self.outlined is None:
            assert self.module is not None
            return RankModel(self.plan, self.module)
        return RankModel(self.plan, self.outlined.cut.ways.module, self.outlined.cut)

    def with_plan(self, plan: Plan) -> Planned:
        """Return the same model under a plan that splits it in the same way."""
        outlined = None if self.outlined is None else replace(self.outlined, plan=plan)
        return replace(self, plan=plan, outlined=outlined)

    def with_savers(self, savers: Sequence[Written]) -> Planned:
        """Return the same model with savers in its plan, and the units that a budget asks for.

        Raises BadInput where they cannot be combined with the rest, or no units meet the budget.
        """
        plan, outline = self.plan.model_copy(update={"savers": tuple(savers)}), self.outline
        recipe.check(self.asked.config, plan)
        return self.with_plan(with_recomputed_units(plan, outline.module, self.asked, outline.cut))

    def hold(self) -> RankModel:
        """Build and return the model that this rank trains. Call it once."""
        return self.outline if self.outlined is None else _held(self.source, self.outlined, self.asked)

    def part(self) -> RankModel:
        """Return a second, uncompiled build of the model that `hold` returns."""
        plain = replace(self.asked, config=_not_compiled(self.asked.config))
        if self.outlined is None:
            return RankModel(self.plan, self.whole())
        return _held(self.source.again(), self.outlined, plain)

    def whole(self) -> nn.Module:
        """Return a new build of the full model, as one process has it."""
        module = self.source.again().whole().to(self.asked.device)
        if self.outlined is not None:
            self.outlined.units_of(module)  # a model that is one unit gets stretches of its graph for units
        return module


def build_rank_model(source: ModelProvider, asked: PartitionRequest, plan: Plan | None = None) -> RankModel:
    """Return this rank's part of the model under `plan`, or under a new plan if None.

    Needs no other rank. Raises BadInput if the model cannot be split so.
    """
    return planned(source, asked, plan).hold()


def planned(source: ModelProvider, asked: PartitionRequest, plan: Plan | None = None) -> Planned:
    """Return the plan of a model and its split into pipeline stages, if any; no stage is built. Raises BadInput."""
    if not (in_stages(asked.config) if plan is None else plan.axes.in_stages):
        module = source.whole().to(asked.device)
        return Planned(source, asked, with_recomputed_units(_begun(plan, module, asked), module, asked), module, None)
    source.share(asked.local_ranks)
    found = outline_stages(source, asked, plan)
    return Planned(source, asked, found.plan, None, found)


def _held(source: ModelProvider, found: StagedOutline, asked: PartitionRequest) -> RankModel:
    here = found.cut.stages_at(found.plan.axes.place(asked.rank)[1])
    mine = [part for part in found.cut.parts if part.stage in here]
    module, stages_here, digests = _built(source, found, mine, asked)
    return RankModel(found.plan, module, replace(found.cut, stages=stages_here, digests=digests))


def _not_compiled(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})


def outline_stages(source: ModelProvider, asked: PartitionRequest, plan: Plan | None = None) -> StagedOutline:
    """Return the plan of a model in pipeline stages, with split points and cost estimate. Raises BadInput."""
    config, outline = asked.config, source.outline()
    check_open(outline, "plan.mesh.pipe")
    plan = _begun(plan, outline, asked)
    run = Forward(asked.objective, precision_of(config.train.precision), asked.device)
    first = Feed(asked.batches, plan, 0, config.train.seed).fetch(0)[0].rows
    find = partial(_units, plan, run, first)
    units = find(outline)
    construction = source.construction()
    readers = Readers(outline, construction.computed)
    flow = InputVariants(outline, readers.around(run), SplitPoints(()), units).flow(first)
    readers.check()
    if plan.cuts:
        cuts = SplitPoints(plan.cuts)
        check_cuts(cuts, flow, outline, plan, config)
    else:
        cuts, why = split_points(flow, outline, plan, config)
        plan = plan.model_copy(update={"cuts": cuts.first, "reasons": {**plan.reasons, "cuts": why}})
    if construction.reason:
        plan = plan.model_copy(update={"reasons": {**plan.reasons, "build": construction.reason}})
    cut = StagedModel(InputVariants(outline, run, cuts, units), stage_specs(outline, flow, cuts), {}, _groups(plan))
    check_shared_memory(construction, cut)
    cut.ways.check_chance(first, flow)
    cut.ways.know(first, flow, cut.parts)
    check_room(plan, cut, asked)
    plan = with_recomputed_units(plan, outline, asked, cut)
    reasons = {**plan.reasons, "pipeline_schedule": bubble_reason(plan, flow, cut.parts)}
    plan = plan.model_copy(update={"forecast": forecast_of(plan, cut, asked.batches, config), "reasons": reasons})
    return StagedOutline(plan, cut, flow, find)


def _begun(plan: Plan | None, module: nn.Module, asked: PartitionRequest) -> Plan:
    """Return the given plan, checked against the model, or a new one; as far as it needs no trace."""
    check_subnets(module, needs_subnets=asked.objective.needs_subnets)
    if plan is None:
        return make_plan(asked.config, module, ranks=asked.ranks, device=asked.device)
    recipe.check(asked.config, plan)
    check_units(module, plan.units)
    units = units_of(module, asked.config.plan.units)
    if asked.config.plan.units != "auto" and plan.units and plan.units != units:
        raise other_than_planned("plan.units", plan.units, units)
    return plan if plan.units else plan.model_copy(update={"units": units})


def _units(plan: Plan, run: Forward, rows: Mapping[str, Tensor], module: nn.Module) -> tuple[str, ...]:
    """Return the plan's units; a model that is one unit gets segments of its graph as units."""
    return plan.units if plan.units != ("",) else with_segments(module, partial(run, module, rows))


def _built(
    source: ModelProvider, found: StagedOutline, mine: list[StageSpec], asked: PartitionRequest
) -> tuple[nn.Module, dict[int, StageModule], dict[str, int]]:
    """Return a rank's module, its stages, and hashes of the initial values that it has seen."""
    holds = frozenset[str]().union(*(part.holds for part in mine))
    module = source.part(holds)
    digests = source.digests()
    module = module.to(asked.device)
    units = found.units_of(module)
    if asked.config.model.compile:
        compile_units(module, units)
    stages = {part.stage: StageModule(module, found.flow, part, keep=holds) for part in mine}
    return module, stages, digests


def _groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every stage, within a replica."""
    schedule = schedule_of(plan, 0, PlanMethods.of(plan).schedule)
    return tuple(schedule.ranks_of(stage) for stage in range(schedule.stages))
