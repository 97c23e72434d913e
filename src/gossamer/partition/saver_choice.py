"""What savers do to the memory of a micro-batch, and the units that a budget of recompute asks for, on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from gossamer.model.ghost_step import UnitGhost, ghost_of_units
from gossamer.model.precision import precision_of
from gossamer.partition.request import PartitionRequest
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Feed, RankBatch, moved
from gossamer.run.staged_model import Forward
from gossamer.saver import Saver, Site, UnitBytes, UnitChoice, cheapest_set, install_all, least_budget
from gossamer.saver.recompute import Recompute, recomputable
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Written
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_bytes

_KEY = "plan.savers.recompute.budget"
_TRIES = 8  # of a set whose bytes differ from the sum of its units'


def saving(
    run: Forward, savers: Sequence[Saver], *, units: Sequence[str], batch: RankBatch, in_stages: bool = False
) -> Callable[[nn.Module], Tensor]:
    """Return the forward of a batch through an outline of the model in which `savers` are installed first."""

    def loss(outline: nn.Module) -> Tensor:
        site = Site(units=tuple(units), objective=run.objective, in_stages=in_stages, is_outline=True)
        found: Tensor = replace(run, objective=install_all(savers, outline, site).objective)(outline, batch)
        return found

    return loss


def with_recomputed_units(plan: Plan, module: nn.Module, asked: PartitionRequest) -> Plan:
    """Return the plan with the units that a budget of recompute asks for, and the reason; raises BadInput for none."""
    savers = PlanMethods.of(plan).savers
    place = next((i for i, one in enumerate(savers) if isinstance(one, Recompute) and one.is_open), None)
    if place is None or plan.mesh.in_stages:
        return plan
    open_ = savers[place]
    assert isinstance(open_, Recompute)
    run, batch = Forward(asked.objective, precision_of(asked.config.train.precision), asked.device), _batch(plan, asked)

    def look(names: Sequence[str]) -> UnitGhost:
        chosen = (*savers[:place], replace(open_, units=tuple(names)), *savers[place + 1 :])
        return ghost_of_units(module, saving(run, chosen, units=plan.units, batch=batch), plan.units)

    names, plain, peak = _within(open_.budget_bytes, recomputable(module, plan.units), look)
    written: Written = {"recompute": {"budget": open_.budget, "units": list(names)}}
    extra = sum(w for name, w in zip(plain.units, plain.work, strict=True) if name in names) / sum(plain.work)
    why = (
        f"recompute of {len(names)} units: activations take {show_bytes(peak)} at most, {show_bytes(plain.peak)} "
        f"without; {100 * extra:.0f} % more work in the forward pass"
    )
    reasons = {**plan.reasons, "savers": why}
    each = (*plan.savers[:place], written, *plan.savers[place + 1 :])
    return plan.model_copy(update={"savers": each, "reasons": reasons})


def _within(
    budget: int, candidates: Sequence[str], look: Callable[[Sequence[str]], UnitGhost]
) -> tuple[tuple[str, ...], UnitGhost, int]:
    """Return the cheapest units to recompute within `budget` bytes, the ghost without them, and the peak with them.

    A set is looked at as a whole before it is taken: what its units take together may be other than their sum.
    """
    plain, again = look(()), look(candidates)
    if plain.peak <= budget:
        return (), plain, plain.peak
    choices = [_choice(name, plain, again, candidates) for name in plain.units]
    aim = budget
    for _ in range(_TRIES):
        chosen = cheapest_set(choices, aim)
        if chosen is None:
            break
        names = tuple(plain.units[i] for i in chosen)
        peak = look(names).peak
        if peak <= budget:
            return names, plain, peak
        aim -= max(1, peak - budget)
    least = look([plain.units[i] for i in cheapest_set(choices, least_budget(choices)) or ()]).peak
    raise bad_input(
        wanted=f"a budget of at least {min(least, again.peak)} bytes ({show_bytes(min(least, again.peak))}), the least "
        "that the activations of a micro-batch take with recompute",
        got=f"{budget} bytes ({show_bytes(budget)})",
        do="raise the budget, or train.accumulate, which makes micro-batches smaller",
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
    found = Feed(asked.batches, plan, rows.index(max(rows)), asked.config.train.seed).fetch(0)[0].rows
    return moved(found, asked.device)
