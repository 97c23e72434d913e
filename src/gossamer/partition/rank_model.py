"""Build a rank's part of the model: the full model, or the pipeline stages that the plan places on this rank.

Every rank traces the model without its weights, finds the same split points, and builds only its own part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from gossamer import recipe
from gossamer.loss import Loss
from gossamer.model.compiled import compile_units
from gossamer.model.mapped_storage import into_memory, mapped
from gossamer.model.module_copy import copied
from gossamer.model.precision import precision_of
from gossamer.model.python_state.random_generators import generators_kept
from gossamer.model.snapshot import Snapshot
from gossamer.model.source import ModelSource
from gossamer.model.split.constructor_state import (
    ConstructorState,
    Readers,
    check_held,
    check_twice,
    digests_of,
    shared_memory,
    tensors_of,
)
from gossamer.model.split.constructor_trace import NotSimple
from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.meta_init import MetaModel, hollow_out, registered, without_storage
from gossamer.model.split.segments import with_segments
from gossamer.model.split.split_points import SplitPoints, StageSpec, balanced_split, stage_specs
from gossamer.model.split.stage import StageModule
from gossamer.model.unit_config import check_open, check_units, units_of
from gossamer.model.units import block_names
from gossamer.partition.plan_file import make_plan
from gossamer.pipeline.from_plan import schedule_of
from gossamer.plan import Border, Staged, price_of_stages
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Batches, Feed
from gossamer.run.resources import memory
from gossamer.run.staged_model import Forward, StagedModel, boundary_of
from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput, RunFailed, bad_input
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_gib


class ModelProvider(ABC):
    """The source from which a rank builds its part of a model: the user's constructor, or an existing module."""

    @abstractmethod
    def whole(self) -> nn.Module:
        """Return the full model."""

    @abstractmethod
    def outline(self) -> nn.Module:
        """Return the model with its forward as in training, but without memory for its parameters."""

    @abstractmethod
    def construction(self) -> ConstructorState:
        """Return the record of the model's construction: shared memory, and tensors computed from parameters."""

    @abstractmethod
    def part(self, holds: frozenset[str]) -> nn.Module:
        """Return the model with the parameters named in `holds`; the others have no memory, or may be freed.

        Raises BadInput if one of them has no values of its own, or other values than the last time.
        """

    @abstractmethod
    def digests(self) -> dict[str, int]:
        """Return a 48-bit hash of each initial parameter and buffer that this rank has seen, by name.

        The name "" stands for the operations of the constructor.
        """

    @abstractmethod
    def share(self, ranks: int) -> None:
        """Set the number of ranks that build at the same time in this machine's memory."""

    @abstractmethod
    def again(self) -> ModelProvider:
        """Return a source that builds new modules of the same model, whatever happens to the earlier ones."""


@dataclass
class OriginSource(ModelProvider):
    """A model that is not built yet, from the configured model source.

    If its constructor is simple (`MetaModel`), its parts are built without memory for the rest. Otherwise the
    constructor runs with real parameters on every rank, partly in files if the model exceeds the rank's share of
    memory. Parameters that the rank does not hold are then freed.
    """

    origin: ModelSource
    seed: int
    ranks: int = 1
    _digests: dict[str, int] = field(default_factory=dict, repr=False)
    _before: Snapshot | None = field(default=None, repr=False)  # the user's code, before its constructor first ran

    @cached_property
    def _found(self) -> tuple[nn.Module, MetaModel | None, ConstructorState]:
        try:
            skeleton = MetaModel.of(self._bare, is_loaded=self.origin.has_weights)
            return skeleton.module, skeleton, ConstructorState()
        except NotSimple as not_simple:
            with registered() as names:
                module = self._real()
            reason = f"whole on every rank: {not_simple.finding.told(names(module))}"
        construction = ConstructorState.of(module, reason)
        hollow_out(module, frozenset())
        return module, None, construction

    def whole(self) -> nn.Module:
        return self._anew(lambda: self.origin.build(self.seed))

    def outline(self) -> nn.Module:
        return self._found[0]

    def construction(self) -> ConstructorState:
        return self._found[2]

    def part(self, holds: frozenset[str]) -> nn.Module:
        skeleton = self._found[1]
        module = self._of_parts(skeleton, holds) if skeleton is not None else None
        if module is None:
            module = self._real(holds)
            hollow_out(module, holds)
        check_held(module, holds)
        return module

    def digests(self) -> dict[str, int]:
        return dict(self._digests)

    def share(self, ranks: int) -> None:
        self.ranks = ranks

    def _of_parts(self, skeleton: MetaModel, holds: frozenset[str]) -> nn.Module | None:
        """Return the model with some parameters; None if its constructor then takes another path."""
        try:
            # What is loaded brings its own memory.
            module = skeleton.build(self._bare, frozenset() if self.origin.has_weights else holds)
        except NotSimple:
            if (made := ConstructorState.of(self._real(), "")) != ConstructorState():
                raise RunFailed(f"{self.origin.describe()} is made in another way every time ({made})") from None
            return None
        self.origin.load(module, holds)
        check_held(module, holds)
        buffers = frozenset(name for name, _ in module.named_buffers())
        self._keep({"": skeleton.tape} | digests_of(module, holds | buffers))
        return module

    def _real(self, holds: frozenset[str] = frozenset()) -> nn.Module:
        """Return the full model, built with real parameters.

        Large tensors are in files if the model exceeds this rank's share of memory, except those named in `holds`.
        """
        with mapped(memory()[1] // (2 * self.ranks)) as places:
            module = self.whole()
        if places:
            together = frozenset[str]().union(*shared_memory(module))
            into_memory((x for n, x in tensors_of(module).items() if n in holds - together), places)
        check_held(module, frozenset(name for name, _ in module.named_parameters()))
        self._keep(digests_of(module))
        return module

    def _keep(self, found: dict[str, int]) -> None:
        check_twice(self._digests, found)
        self._digests |= found

    def _bare(self) -> nn.Module:
        return self._anew(lambda: self.origin.bare(self.seed))

    def _anew(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build from the same state of the user's code every time; side effects of the constructor remain once."""
        if self.origin.code is not None:
            with generators_kept():
                if self._before is not None:
                    self._before.put_back()
                holder = nn.Module()
                vars(holder)["code"] = self.origin.code
                self._before = Snapshot.of(holder)  # anew: iterators are put back once
        return build()

    def again(self) -> ModelProvider:
        return self


@dataclass(frozen=True, slots=True)
class ModuleSource(ModelProvider):
    """A module of the caller, built in full; parameters that this rank does not hold are freed."""

    module: nn.Module

    def whole(self) -> nn.Module:
        return self.module

    def outline(self) -> nn.Module:
        try:
            return without_storage(self.module)
        except (TypeError, RuntimeError) as error:
            raise bad_input(
                wanted="a module that can be copied, to look at what it does before it is cut",
                got=f"{type(error).__name__}: {error}",
                do="give a function that builds it instead (model.factory)",
                key="model",
            ) from error

    def construction(self) -> ConstructorState:
        return ConstructorState.of(self.module, "")

    def part(self, holds: frozenset[str]) -> nn.Module:
        check_held(self.module, holds)
        return self.module

    def digests(self) -> dict[str, int]:
        return digests_of(self.module)

    def share(self, ranks: int) -> None:
        pass

    def again(self) -> ModelProvider:
        return CopySource(self.module)


@dataclass(frozen=True, slots=True)
class CopySource(ModelProvider):
    """A source that returns copies of a module."""

    module: nn.Module

    def whole(self) -> nn.Module:
        return copied(self.module)

    def outline(self) -> nn.Module:
        return ModuleSource(self.module).outline()

    def construction(self) -> ConstructorState:
        return ConstructorState.of(self.module, "")

    def part(self, holds: frozenset[str]) -> nn.Module:
        check_held(self.module, holds)
        return copied(self.module, holds)

    def digests(self) -> dict[str, int]:
        return digests_of(self.module)

    def share(self, ranks: int) -> None:
        pass

    def again(self) -> ModelProvider:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRequest:
    """The rank, device, batches and loss for which a part of the model is built."""

    config: RunConfig
    ranks: int
    rank: int
    batches: Batches
    objective: Loss
    device: torch.device
    local_ranks: int = 1  # number of ranks on this host


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
    wanted = asked.config.plan
    in_stages = plan.mesh.pipe > 1 if plan else wanted.mesh.pipe not in (1, "auto") or wanted.stage_ranks != "auto"
    if not in_stages:
        module = source.whole().to(asked.device)
        return Planned(source, asked, _begun(plan, module, asked), module, None)
    source.share(asked.local_ranks)
    found = outline_stages(source, asked, plan)
    return Planned(source, asked, found.plan, None, found)


def _held(source: ModelProvider, found: StagedOutline, asked: PartitionRequest) -> RankModel:
    here = found.cut.stages_at(found.plan.place_of(asked.rank)[1])
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
        _check_cuts(cuts, flow, outline, plan, config)
    else:
        cuts, why = _cuts(flow, outline, plan, config)
        plan = plan.model_copy(update={"cuts": cuts.first, "reasons": {**plan.reasons, "cuts": why}})
    if construction.reason:
        plan = plan.model_copy(update={"reasons": {**plan.reasons, "build": construction.reason}})
    cut = StagedModel(InputVariants(outline, run, cuts, units), stage_specs(outline, flow, cuts), {}, _groups(plan))
    _check_memory(construction, cut)
    cut.ways.check_chance(first, flow)
    cut.ways.know(first, flow, cut.parts)
    _check_room(plan, cut, asked)
    plan = plan.model_copy(update={"forecast": forecast_of(plan, cut, asked.batches, config)})
    return StagedOutline(plan, cut, flow, find)


def _begun(plan: Plan | None, module: nn.Module, asked: PartitionRequest) -> Plan:
    """Return the given plan, checked against the model, or a new one; as far as it needs no trace."""
    if plan is None:
        return make_plan(asked.config, module, ranks=asked.ranks, device=asked.device)
    recipe.check(asked.config, plan)
    check_units(module, plan.units)
    units = units_of(module, asked.config.plan.units)
    if asked.config.plan.units != "auto" and plan.units and plan.units != units:
        raise _other("plan.units", plan.units, units)
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


def _check_memory(construction: ConstructorState, cut: StagedModel) -> None:
    """Raise BadInput if tensors that share memory lie in different stages: one would not see the other's writes."""
    for group in construction.shared:
        at = {name: frozenset(p.stage for p in cut.parts if name in p.holds) for name in sorted(group)}
        if len(set(at.values())) > 1:
            raise bad_input(
                wanted="parameters and buffers with memory of their own, or all that share one in the same stage",
                got=" and ".join(f"{name} (stage {', '.join(map(str, sorted(s))) or '-'})" for name, s in at.items()),
                do="tie parameters by assigning the parameter itself (head.weight = embed.weight), not its .data; or "
                "cut elsewhere",
                key="plan.cuts",
            )


def _check_cuts(cuts: SplitPoints, flow: DataFlow, outline: nn.Module, plan: Plan, config: RunConfig) -> None:
    """Raise BadInput if a plan's split points differ from those in the configuration."""
    if config.plan.cuts != "auto" and (asked := _cuts(flow, outline, plan, config)[0]) != cuts:
        raise _other("plan.cuts", cuts.first, asked.first)


def _other(key: str, has: Sequence[str], asked: Sequence[str]) -> BadInput:
    return bad_input(
        wanted=f"what the plan says ({key.partition('.')[2]} {', '.join(has)})",
        got=", ".join(asked),
        do="leave the key out, change the plan, or train without it",
        key=key,
    )


def _cuts(flow: DataFlow, outline: nn.Module, plan: Plan, config: RunConfig) -> tuple[SplitPoints, str]:
    asked, stages = config.plan.cuts, plan.mesh.pipe
    if asked == "auto":
        return balanced_split(flow, stages), f"{stages} stages of as equal work as whole units allow"
    if len(asked) != stages:
        raise bad_input(
            wanted=f"the first unit of each of {stages} stages",
            got=f"{len(asked)} ({', '.join(map(str, asked))})",
            do="list as many as there are stages (plan.mesh.pipe), the first of them 0",
            key="plan.cuts",
        )
    blocks = block_names(outline, plan.units)
    first = flow.calls[0].name if asked[0] == 0 else _unit(asked[0], blocks)
    return SplitPoints((first, *(_unit(each, blocks) for each in asked[1:]))), "given"


def _unit(given: int | str, blocks: Sequence[str]) -> str:
    """Return the name of a unit that is given by name or by the number of its block."""
    if isinstance(given, str):
        return given
    if not 0 <= given < len(blocks):
        raise bad_input(
            wanted=f"the number of a block, 0 to {len(blocks) - 1}"
            if blocks
            else "the name of a unit (no blocks here)",
            got=str(given),
            do="number the repeated blocks from 0, or name a unit",
            key="plan.cuts",
        )
    return blocks[given]


def _groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every stage, within a replica."""
    schedule = schedule_of(plan, 0, PlanMethods.of(plan).schedule)
    return tuple(schedule.ranks_of(stage) for stage in range(schedule.stages))


def forecast_of(plan: Plan, cut: StagedModel, batches: Batches, config: RunConfig) -> Cost:
    """Return the communication volume of the first step, from the boundary tensors of its micro-batches."""
    shapes = {name: tuple(p.shape) for name, p in cut.ways.module.named_parameters() if p.requires_grad}
    places = range(plan.width)
    held = tuple(tuple((n, s) for n, s in shapes.items() if any(p in g for g in cut.holders(n))) for p in places)
    borders: list[Border] = []
    for replica in range(plan.mesh.replica):
        for number, piece in Feed(batches, plan, replica, config.train.seed).fetch(0).items():
            flow, parts = cut.ways.of(piece.rows)
            borders += [Border(replica, part.stage, number, boundary_of(flow, part).sends) for part in parts[:-1]]
    maker = PlanMethods.of(plan).schedule
    by_count = {m: schedule_of(plan, plan.microbatches.index(m), maker) for m in set(plan.microbatches)}
    schedules = tuple(by_count[m] for m in plan.microbatches)
    return price_of_stages(plan, Staged(schedules, held, cut.shared()), borders)


def _check_room(plan: Plan, cut: StagedModel, asked: PartitionRequest) -> None:
    """Check that the training states of all stages on a GPU, or on a machine, fit its memory. Raises BadInput."""
    on_gpu = asked.device.type == "cuda"
    there = torch.cuda.get_device_properties(asked.device).total_memory if on_gpu else memory()[0]
    sizes = {p.stage: state_bytes_of(cut, p) for p in cut.parts}
    held = [cut.stages_at(plan.place_of(rank)[1]) for rank in range(asked.ranks)]
    together = 1 if on_gpu else asked.local_ranks
    for first in range(0, asked.ranks, together):  # a machine's ranks follow each other
        here = [stage for stages in held[first : first + together] for stage in stages]
        needed = sum(sizes[stage] for stage in here)
        if needed > there:
            stage = max(here, key=lambda stage: sizes[stage])
            beside, others = needed - sizes[stage], f" of {len(here) - 1} others" if len(here) > 1 else ""
            raise bad_input(
                wanted=f"room for stage {stage} (from {cut.ways.cuts.first[stage]}): {show_gib(sizes[stage])} of "
                f"parameters, gradients and optimizer state{f', beside {show_gib(beside)}{others}' if others else ''}",
                got=f"{show_gib(there)} on the {'GPU' if on_gpu else 'machine'} of ranks {first} to "
                f"{min(first + together, asked.ranks) - 1}: {show_gib(needed - there)} too little",
                do="cut the model into more stages, use more machines, or a smaller model.dtype",
                key="plan.mesh.pipe",
            )


def state_bytes_of(cut: StagedModel, part: StageSpec) -> int:
    """Return the bytes of a stage's parameters, gradients and optimizer states.

    Trained parameters count 12 bytes per element more: gradients and two optimizer slots in float32.
    """
    held = [p for name, p in cut.ways.module.named_parameters() if name in part.holds]
    return sum(p.numel() * (p.element_size() + (12 if p.requires_grad else 0)) for p in held)
