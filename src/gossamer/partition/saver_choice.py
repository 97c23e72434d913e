"""What savers do to the memory of a micro-batch, and the units that a budget of recompute asks for, on shapes alone.

A budget counts the activations of one rank at the peak of its schedule. A rank that holds the whole model has one
micro-batch alive; one with a pipeline stage has as many as its place asks for: of all but the one that runs there is
what the stage keeps of it, and what it received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import torch
from torch import Tensor, nn

from gossamer.model.ghost_step import UnitGhost, ghost_of_units
from gossamer.model.precision import precision_of
from gossamer.model.split.later_effects import changes_python
from gossamer.partition.request import PartitionRequest
from gossamer.pipeline.from_plan import schedule_of
from gossamer.pipeline.schedule import StageCosts
from gossamer.pipeline.schedule_tasks import cost_of_schedule
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Feed, RankBatch, moved
from gossamer.run.staged_model import Forward, StagedModel, boundary_of
from gossamer.saver import Saver, Site, UnitBytes, UnitChoice, cheapest_set, install_all, least_budget
from gossamer.saver.recompute import Recompute, recomputable
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_bytes

_KEY = "plan.savers.recompute.budget"
_TRIES = 8  # of a set whose bytes differ from the sum of its units'
_WHOLE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one rank has in memory of its micro-batches: `alive` of them, at the peak of its schedule.

    `stage`: which one it holds, -1 for the whole model; `units`: of that stage; `received`: bytes that came from the
    stage before, of each micro-batch; `who`: for people.
    """

    who: str
    stage: int = _WHOLE
    units: frozenset[str] = frozenset()
    alive: int = 1
    received: int = 0

    @property
    def those_alive(self) -> str:
        """Return how many micro-batches are alive, in words."""
        return f"{self.alive} micro-batch{'es' if self.alive > 1 else ''} alive"

    def of(self, ghost: UnitGhost) -> Iterator[int]:
        """Yield the indices of its units; what comes before all units belongs to those that are first."""
        mine = [at for at, name in enumerate(ghost.units) if self.stage == _WHOLE or name in self.units]
        yield from range(1 if self.stage <= 0 and 0 not in mine else 0)
        yield from mine

    def peak(self, ghost: UnitGhost) -> int:
        """Return the bytes at the peak."""
        kept = self.received + sum(ghost.kept[at] for at in self.of(ghost))
        return (self.alive - 1) * kept + self.received + ghost.peaks[max(self.stage, 0)]

    def choices(self, plain: UnitGhost, again: UnitGhost, candidates: Sequence[str]) -> tuple[UnitChoice, ...]:
        """Return the choices of its units, after what it received."""
        here = UnitBytes(kept=self.received, most=self.received)
        units = (_choice(plain.units[at], plain, again, candidates) for at in self.of(plain))
        return (UnitChoice(seconds=0.0, plain=here, again=None), *units)

    def names(self, ghost: UnitGhost, chosen: Sequence[int]) -> list[str]:
        """Return the names of the units with these indices in `choices`."""
        mine = ["", *(ghost.units[at] for at in self.of(ghost))]
        return [mine[at] for at in chosen]


def saving(
    run: Forward, savers: Sequence[Saver], *, units: Sequence[str], batch: RankBatch, in_stages: bool = False
) -> Callable[[nn.Module], Tensor]:
    """Return the forward of a batch through an outline of the model in which `savers` are installed first."""

    def loss(outline: nn.Module) -> Tensor:
        site = Site(units=tuple(units), objective=run.objective, in_stages=in_stages, is_outline=True)
        found: Tensor = replace(run, objective=install_all(savers, outline, site).objective)(outline, batch)
        return found

    return loss


def with_recomputed_units(
    plan: Plan, module: nn.Module, asked: PartitionRequest, cut: StagedModel | None = None
) -> Plan:
    """Return the plan with the units that a budget of recompute asks for, and the reason; raises BadInput for none.

    `cut`: the model's pipeline stages, whose outline is `module`; None for a model in one stage.
    """
    savers = PlanMethods.of(plan).savers
    place = next((i for i, one in enumerate(savers) if isinstance(one, Recompute) and one.is_open), None)
    if place is None:
        return plan
    open_, units = savers[place], plan.units if cut is None else cut.ways.units
    assert isinstance(open_, Recompute)
    device = asked.device if cut is None else torch.device("cpu")  # a model in stages is an outline there
    batch = moved(_batch(plan, asked), device)
    run = Forward(asked.objective, precision_of(asked.config.train.precision), device)
    loads = (Load(who="a micro-batch"),) if cut is None else _loads(plan, cut, batch)
    groups = [one.units for one in loads if one.stage != _WHOLE]

    def look(names: Sequence[str]) -> UnitGhost:
        chosen = (*savers[:place], replace(open_, units=tuple(names)), *savers[place + 1 :])
        once = saving(run, chosen, units=units, batch=batch, in_stages=cut is not None)
        return ghost_of_units(module, once, units, groups=groups)

    candidates = recomputable(module, units)
    if cut is not None:  # as `Recompute` refuses those there
        candidates = tuple(name for name in candidates if not changes_python(module.get_submodule(name)))
    found = _within(open_.budget_bytes, candidates, loads, look)
    written: Written = {"recompute": {"budget": open_.budget, "units": list(found.names)}}
    each = (*plan.savers[:place], written, *plan.savers[place + 1 :])
    return plan.model_copy(update={"savers": each, "reasons": {**plan.reasons, "savers": found.told(loads)}})


@dataclass(frozen=True, slots=True)
class _Found:
    """The units that are recomputed, and the bytes of the model without and with that."""

    names: tuple[str, ...]
    plain: UnitGhost
    saved: UnitGhost

    def told(self, loads: Sequence[Load]) -> str:
        """Return what is recomputed, and what that saves and costs."""
        again = sum(w for name, w in zip(self.plain.units, self.plain.work, strict=True) if name in self.names)
        sizes = ((one, show_bytes(one.peak(self.saved)), show_bytes(one.peak(self.plain))) for one in loads)
        each = [
            f"activations take {less} at most, {more} without"
            if one.stage == _WHOLE
            else f"activations of {one.who}, with {one.those_alive}, take {less} at most, {more} without"
            for one, less, more in sizes
        ]
        more = f"{100 * again / sum(self.plain.work):.0f} % more work in the forward pass"
        return f"recompute of {len(self.names)} units: {'; '.join((*each, more))}"


def _within(
    budget: int, candidates: Sequence[str], loads: Sequence[Load], look: Callable[[Sequence[str]], UnitGhost]
) -> _Found:
    """Return the cheapest units to recompute so that every load is within `budget` bytes.

    A set is looked at as a whole before it is taken: what its units take together may be other than their sum.
    """
    plain, again = look(()), look(candidates)
    if all(load.peak(plain) <= budget for load in loads):
        return _Found((), plain, plain)
    choices = [load.choices(plain, again, candidates) for load in loads]
    aims = [budget] * len(loads)
    for _ in range(_TRIES):
        sets = [cheapest_set(one, aim, alive=load.alive) for load, one, aim in zip(loads, choices, aims, strict=True)]
        known = [one for one in sets if one is not None]
        if len(known) < len(sets):
            break
        found = _found(loads, known, plain, look)
        over = [load.peak(found.saved) - budget for load in loads]
        if max(over) <= 0:
            return found
        aims = [aim - more if more > 0 else aim for aim, more in zip(aims, over, strict=True)]
    return _least_within(budget, loads, choices, _Found(tuple(candidates), plain, again), look)


def _found(
    loads: Sequence[Load], sets: Sequence[Sequence[int]], plain: UnitGhost, look: Callable[[Sequence[str]], UnitGhost]
) -> _Found:
    chosen = {name for load, one in zip(loads, sets, strict=True) for name in load.names(plain, one)}
    names = tuple(name for name in plain.units if name in chosen)
    return _Found(names, plain, look(names))


def _least_within(
    budget: int,
    loads: Sequence[Load],
    choices: Sequence[Sequence[UnitChoice]],
    again: _Found,
    look: Callable[[Sequence[str]], UnitGhost],
) -> _Found:
    """Return what takes the fewest bytes, where that is within `budget`; raise BadInput where it is not."""
    sets = []
    for load, one in zip(loads, choices, strict=True):
        least = cheapest_set(one, least_budget(one, alive=load.alive), alive=load.alive)
        sets.append(() if least is None else least)
    ways = (again, _found(loads, sets, again.plain, look))
    best = min(ways, key=lambda way: max(load.peak(way.saved) for load in loads))
    worst = max(loads, key=lambda load: load.peak(best.saved))
    least_bytes = worst.peak(best.saved)
    if least_bytes <= budget:
        return best
    raise _too_small(budget, worst, least_bytes)


def _too_small(budget: int, worst: Load, least: int) -> BadInput:
    alive = "" if worst.stage == _WHOLE else f", with {worst.those_alive} at the peak of its schedule"
    do = "raise the budget, or train.accumulate, which makes micro-batches smaller"
    return bad_input(
        wanted=f"a budget of at least {least} bytes ({show_bytes(least)}), the least that the activations of "
        f"{worst.who} take with recompute{alive}",
        got=f"{budget} bytes ({show_bytes(budget)})",
        do=do if worst.stage == _WHOLE else f"{do}, or split the model into more stages (plan.mesh.pipe)",
        key=_KEY,
    )


def _choice(name: str, plain: UnitGhost, again: UnitGhost, candidates: Sequence[str]) -> UnitChoice:
    here = plain.units.index(name)
    is_candidate = name in candidates and name in again.units
    there = again.units.index(name) if is_candidate else 0
    return UnitChoice(
        seconds=plain.work[here],
        plain=UnitBytes(kept=plain.kept[here], most=plain.most[here]),
        again=UnitBytes(kept=again.kept[there], most=again.most[there]) if is_candidate else None,
    )


def _batch(plan: Plan, asked: PartitionRequest) -> RankBatch:
    """Return a micro-batch like the largest of the run."""
    rows = [-(-count // pieces) for count, pieces in zip(plan.rows, plan.microbatches, strict=True)]
    return Feed(asked.batches, plan, rows.index(max(rows)), asked.config.train.seed).fetch(0)[0].rows


def _loads(plan: Plan, cut: StagedModel, batch: RankBatch) -> tuple[Load, ...]:
    """Return the loads of the stages, of each that of the rank and replica with the most micro-batches alive."""
    flow, parts = cut.ways.of(batch)
    held = [frozenset(call.unit for call in flow.calls[part.low : part.high]) for part in parts]
    twice = next((name for one, later in combinations(held, 2) for name in sorted(one & later)), None)
    if twice is not None:
        raise bad_input(
            wanted="units that one stage alone runs, for a budget of recompute in stages",
            got=f"{twice}, which several stages run",
            do="name the units to recompute (units), or set plan.cuts so that one stage has all calls of it",
            key=_KEY,
        )
    found = []
    for part, names in zip(parts, held, strict=True):
        alive, ranks = _alive(plan, cut, part.stage)
        edges = boundary_of(flow, part).receives
        received = sum(prod(one.form.shape) * one.form.dtype.itemsize for one in edges)
        who = f"stage {part.stage} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
        found.append(Load(who=who, stage=part.stage, units=names, alive=alive, received=received))
    return tuple(found)


def _alive(plan: Plan, cut: StagedModel, stage: int) -> tuple[int, list[int]]:
    """Return how many micro-batches a rank of a stage has alive at most, and the ranks of that stage."""
    maker, most = PlanMethods.of(plan).schedule, 0
    for replica in range(plan.mesh.replica):
        schedule = schedule_of(plan, replica, maker)
        counting = [StageCosts(live_bytes=int(number == stage)) for number in range(schedule.stages)]
        peaks = cost_of_schedule(schedule, counting).peak_bytes
        most = max(most, *(peaks[place] for place in cut.groups[stage]))
    places = {rank: plan.axes.place(rank)[1] for rank in range(plan.ranks)}
    return most, [rank for rank, place in places.items() if place in cut.groups[stage]]
