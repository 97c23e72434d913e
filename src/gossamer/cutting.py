"""A rank's part of the model: the whole of it, or the stages that the plan places here.

Every rank looks at the whole model without its weights, finds the same cuts, and builds its own part alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from gossamer.loss import Objective
from gossamer.model.compiled import compile_units
from gossamer.model.copied import copied
from gossamer.model.cut.cuts import Cuts, Part, even_cuts, parts_of
from gossamer.model.cut.flow import Flow
from gossamer.model.cut.partial import Skeleton, hollowed
from gossamer.model.cut.segments import with_segments
from gossamer.model.cut.stage import Stage
from gossamer.model.cut.ways import Ways
from gossamer.model.given import check_units, units_of
from gossamer.model.origin import Origin
from gossamer.model.precision import precision_of
from gossamer.model.units import block_names
from gossamer.pipeline.planned import schedule_of
from gossamer.plan import Border, Staged, law, price_of_stages
from gossamer.planning import make_plan
from gossamer.run.batches import Batches, Feed
from gossamer.run.cut import Cut, Forward, boundary_of
from gossamer.run.machine import memory
from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_gib


class Source(ABC):
    """What a rank's part of a model is made from."""

    @abstractmethod
    def whole(self) -> nn.Module:
        """All of it."""

    @abstractmethod
    def outline(self) -> nn.Module:
        """The model as it runs and is called, without memory for its parameters."""

    @abstractmethod
    def part(self, holds: frozenset[str]) -> nn.Module:
        """The model with the parameters named in `holds`;
        the others have no memory."""

    @abstractmethod
    def again(self) -> Source:
        """One that makes other modules of the same model, whatever becomes of those that were made."""


@dataclass
class OriginSource(Source):
    """A model nobody has built yet."""

    origin: Origin
    seed: int

    @cached_property
    def skeleton(self) -> Skeleton:
        return Skeleton.of(self._build)

    def whole(self) -> nn.Module:
        return self.origin.build(self.seed)

    def outline(self) -> nn.Module:
        return self.skeleton.module

    def part(self, holds: frozenset[str]) -> nn.Module:
        # What is loaded brings its own memory.
        module = self.skeleton.build(self._build, frozenset() if self.origin.has_weights else holds)
        self.origin.load(module, holds)
        return module

    def again(self) -> Source:
        return self

    def _build(self) -> nn.Module:
        return self.origin.bare(self.seed)


@dataclass(frozen=True, slots=True)
class ModuleSource(Source):
    """A module of the caller's, which is there whole; what this rank does not hold is given back."""

    module: nn.Module

    def whole(self) -> nn.Module:
        return self.module

    def outline(self) -> nn.Module:
        return hollowed(self.module)

    def part(self, holds: frozenset[str]) -> nn.Module:
        return self.module

    def again(self) -> Source:
        return CopySource(self.module)


@dataclass(frozen=True, slots=True)
class CopySource(Source):
    """Copies of a module."""

    module: nn.Module

    def whole(self) -> nn.Module:
        return copied(self.module)

    def outline(self) -> nn.Module:
        return hollowed(self.module)

    def part(self, holds: frozenset[str]) -> nn.Module:
        return copied(self.module, holds)

    def again(self) -> Source:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """For whom a model is to be held, and for what."""

    config: RunConfig
    ranks: int
    rank: int
    batches: Batches
    objective: Objective
    device: torch.device
    local_ranks: int = 1  # that share the device's memory


@dataclass(frozen=True, slots=True)
class Held:
    """The module of one rank, the plan, and how the module is cut where it is not the whole model."""

    plan: Plan
    module: nn.Module
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class Outlined:
    """A model in stages before any of it is built: what all ranks find alike."""

    plan: Plan
    cut: Cut
    flow: Flow  # of the first micro-batch
    units_of: Callable[[nn.Module], tuple[str, ...]]  # of this model, whoever built it


@dataclass(frozen=True, slots=True)
class Planned:
    """A model before a rank's part of it is built. What is not in stages is whole on every rank, and there already."""

    source: Source
    asked: Asked
    plan: Plan
    module: nn.Module | None
    outlined: Outlined | None

    @property
    def outline(self) -> Held:
        """As far as it is known: where it is in stages, the whole without its numbers and nothing of this rank."""
        if self.outlined is None:
            assert self.module is not None
            return Held(self.plan, self.module)
        return Held(self.plan, self.outlined.cut.ways.module, self.outlined.cut)

    def hold(self) -> Held:
        """What this rank trains. Called once."""
        return self.outline if self.outlined is None else _held(self.source, self.outlined, self.asked)

    def part(self) -> Held:
        """What `hold` gives, or has given, made anew and not compiled."""
        plain = replace(self.asked, config=_not_compiled(self.asked.config))
        if self.outlined is None:
            return Held(self.plan, self.whole())
        return _held(self.source.again(), self.outlined, plain)

    def whole(self) -> nn.Module:
        """All of the model, made anew, as one process has it."""
        module = self.source.again().whole().to(self.asked.device)
        if self.outlined is not None:
            self.outlined.units_of(module)  # a model that is one unit gets stretches of its graph for units
        return module


def hold(source: Source, asked: Asked, plan: Plan | None = None) -> Held:
    """What this rank has of the model under a plan, which is made where none is given.

    Raises BadInput where the model cannot be cut so. No rank needs another one for it.
    """
    return planned(source, asked, plan).hold()


def planned(source: Source, asked: Asked, plan: Plan | None = None) -> Planned:
    """The plan of a model, and where it is in stages how it is cut; nothing of these is built. Raises BadInput."""
    wanted = asked.config.plan
    in_stages = plan.mesh.pipe > 1 if plan else wanted.mesh.pipe not in (1, "auto") or wanted.stages != "auto"
    if not in_stages:
        module = source.whole().to(asked.device)
        return Planned(source, asked, _begun(plan, module, asked), module, None)
    found = outlined(source, asked, plan)
    return Planned(source, asked, found.plan, None, found)


def _held(source: Source, found: Outlined, asked: Asked) -> Held:
    here = found.cut.stages_at(found.plan.place_of(asked.rank)[1])
    mine = [part for part in found.cut.parts if part.stage in here]
    module, stages_here = _built(source, found, mine, asked)
    return Held(found.plan, module, replace(found.cut, stages=stages_here))


def _not_compiled(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})


def outlined(source: Source, asked: Asked, plan: Plan | None = None) -> Outlined:
    """The plan of a model in stages with its cuts and its forecast. Raises BadInput."""
    config, outline = asked.config, source.outline()
    plan = _begun(plan, outline, asked)
    run = Forward(asked.objective, precision_of(config.train.precision), asked.device)
    first = Feed(asked.batches, plan, 0, config.train.seed).fetch(0)[0].rows
    find = partial(_units, plan, run, first)
    units = find(outline)
    flow = Ways(outline, run, Cuts(()), units).flow(first)
    if plan.cuts:
        cuts = Cuts(plan.cuts)
        _check_cuts(cuts, flow, outline, plan, config)
    else:
        cuts, why = _cuts(flow, outline, plan, config)
        plan = plan.model_copy(update={"cuts": cuts.first, "reasons": {**plan.reasons, "cuts": why}})
    cut = Cut(Ways(outline, run, cuts, units), parts_of(outline, flow, cuts), {}, _groups(plan))
    cut.ways.check_chance(first, flow)
    cut.ways.know(first, flow, cut.parts)
    _check_room(plan, cut, asked)
    plan = plan.model_copy(update={"forecast": forecast_of(plan, cut, asked.batches, config)})
    return Outlined(plan, cut, flow, find)


def _begun(plan: Plan | None, module: nn.Module, asked: Asked) -> Plan:
    """The plan that was given, or a new one, as far as a model says it that was not traced yet."""
    if plan is None:
        return make_plan(asked.config, module, ranks=asked.ranks, device=asked.device)
    law.check(asked.config, plan)
    check_units(module, plan.units)
    units = units_of(module, asked.config.plan.units)
    if asked.config.plan.units != "auto" and plan.units and plan.units != units:
        raise _other("plan.units", plan.units, units)
    return plan if plan.units else plan.model_copy(update={"units": units})


def _units(plan: Plan, run: Forward, rows: Mapping[str, Tensor], module: nn.Module) -> tuple[str, ...]:
    """The plan's; a model that is one unit gets stretches of its graph for units."""
    return plan.units if plan.units != ("",) else with_segments(module, partial(run, module, rows))


def _built(source: Source, found: Outlined, mine: list[Part], asked: Asked) -> tuple[nn.Module, dict[int, Stage]]:
    holds = frozenset[str]().union(*(part.holds for part in mine))
    module = source.part(holds).to(asked.device)
    units = found.units_of(module)
    if asked.config.model.compile:
        compile_units(module, units)
    stages = {part.stage: Stage(module, found.flow, part, keep=holds) for part in mine}
    return module, stages


def _check_cuts(cuts: Cuts, flow: Flow, outline: nn.Module, plan: Plan, config: RunConfig) -> None:
    """Raises BadInput where a plan cuts elsewhere than was written beside it."""
    if config.plan.cuts != "auto" and (asked := _cuts(flow, outline, plan, config)[0]) != cuts:
        raise _other("plan.cuts", cuts.first, asked.first)


def _other(key: str, has: Sequence[str], asked: Sequence[str]) -> BadInput:
    return bad_input(
        wanted=f"what the plan says ({key.partition('.')[2]} {', '.join(has)})",
        got=", ".join(asked),
        do="leave the key out, change the plan, or train without it",
        key=key,
    )


def _cuts(flow: Flow, outline: nn.Module, plan: Plan, config: RunConfig) -> tuple[Cuts, str]:
    asked, stages = config.plan.cuts, plan.mesh.pipe
    if asked == "auto":
        return even_cuts(flow, stages), f"{stages} stages of as equal work as whole units allow"
    if len(asked) != stages:
        raise bad_input(
            wanted=f"the first unit of each of {stages} stages",
            got=f"{len(asked)} ({', '.join(map(str, asked))})",
            do="list as many as there are stages (plan.mesh.pipe), the first of them 0",
            key="plan.cuts",
        )
    blocks = block_names(outline, plan.units)
    first = flow.calls[0].name if asked[0] == 0 else _unit(asked[0], blocks)
    return Cuts((first, *(_unit(each, blocks) for each in asked[1:]))), "given"


def _unit(given: int | str, blocks: Sequence[str]) -> str:
    """The name of a unit that was given by it, or as the number of a block."""
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
    """The ranks of every stage, within a replica."""
    schedule = schedule_of(plan, 0)
    return tuple(schedule.ranks_of(stage) for stage in range(schedule.stages))


def forecast_of(plan: Plan, cut: Cut, batches: Batches, config: RunConfig) -> Cost:
    """The bytes of the first step: what crosses the borders is what its micro-batches make of them."""
    shapes = {name: tuple(p.shape) for name, p in cut.ways.module.named_parameters() if p.requires_grad}
    places = range(plan.width)
    held = tuple(tuple((n, s) for n, s in shapes.items() if any(p in g for g in cut.holders(n))) for p in places)
    borders: list[Border] = []
    for replica in range(plan.mesh.replica):
        for number, piece in Feed(batches, plan, replica, config.train.seed).fetch(0).items():
            flow, parts = cut.ways.of(piece.rows)
            borders += [Border(replica, part.stage, number, boundary_of(flow, part).sends) for part in parts[:-1]]
    by_count = {m: schedule_of(plan, plan.microbatches.index(m)) for m in set(plan.microbatches)}
    schedules = tuple(by_count[m] for m in plan.microbatches)
    return price_of_stages(plan, Staged(schedules, held, cut.shared()), borders)


def _check_room(plan: Plan, cut: Cut, asked: Asked) -> None:
    """That the state of every rank's stages, and what shares the memory with it, fits where it is to lie."""
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


def state_bytes_of(cut: Cut, part: Part) -> int:
    """Parameters; where they are trained gradients and two slots of the optimizer in float32 as well."""
    held = [p for name, p in cut.ways.module.named_parameters() if name in part.holds]
    return sum(p.numel() * (p.element_size() + (12 if p.requires_grad else 0)) for p in held)
