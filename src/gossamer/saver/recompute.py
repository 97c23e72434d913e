"""Recompute: a unit keeps its arguments alone, and runs its forward again in the backward pass.

Units:  the repeated blocks of the model (all units where it has none): all, every k-th, those named, or the set that
        keeps the activations of a rank within `budget` at the least seconds (exact, `_cheapest_set.py`).
Memory: of a recomputed unit its arguments from forward to backward, and all that it saves while its backward runs.
Work:   one forward more of every recomputed unit.   Result: bit-equal to plain training.
Stages: with `recompute` alone a pipeline stage recomputes all of itself, right before the backward of a micro-batch;
        with units, every or budget it recomputes these within the backward, as a model in one process does.
Paper:  Chen et al., arXiv:1604.06174; the set by dynamic programming as in Beaumont et al., arXiv:1911.13214 in kind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gossamer.model.split.later_effects import changes_python
from gossamer.model.units import block_names
from gossamer.saver import Installed, Saver, Site
from gossamer.saver._recomputed_unit import RecomputedUnit
from gossamer.spec.errors import bad_input
from gossamer.spec.suggest import nearest
from gossamer.spec.units import read_size


@dataclass(frozen=True, slots=True)
class Recompute(Saver):
    """Recomputation of units: every `every`-th block, or those in `units`, or those that `budget` bytes ask for.

    `budget`: bytes of the activations of a rank at the peak of its schedule, such as 2GiB: in one process those of one
    micro-batch, in stages those of all micro-batches alive. `units` are then what was found for it.
    """

    every: int = 1
    budget: str = ""
    units: tuple[str, ...] | None = None

    with_sharded_parameters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise bad_input(wanted="1 or more", got=str(self.every), do="write 2 for every second unit", key="every")
        if self.every > 1 and (self.budget or self.units is not None):
            raise bad_input(
                wanted="every, or budget, or units, as each says which units are recomputed",
                got=f"every {self.every} beside {'budget' if self.budget else 'units'}",
                do="leave every out",
                key="every",
            )
        if self.budget:
            read_size(self.budget, key="budget")

    @property
    def recomputes_stages(self) -> bool:
        return self == Recompute()

    @property
    def budget_bytes(self) -> int:
        """Return the budget in bytes; 0 for none."""
        return read_size(self.budget, key="plan.savers.recompute.budget") if self.budget else 0

    @property
    def is_open(self) -> bool:
        """Return whether the units are still to be found, from the model's activations."""
        return bool(self.budget) and self.units is None

    def chosen(self, module: nn.Module, units: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the units to recompute, of a model with these units. Raises BadInput for another name."""
        if self.units is not None:
            self._check_known(units)
            return tuple(name for name in units if name in self.units)
        found = recomputable(module, units)
        return tuple(name for place, name in enumerate(found) if place % self.every == 0)

    def install(self, module: nn.Module, site: Site) -> Installed:
        assert not self.is_open, "the plan names the units that a budget asks for"
        if site.in_stages and self.recomputes_stages:  # by its schedule
            return Installed(remove=lambda: None, objective=site.objective)
        here = [name for name in self.chosen(module, site.units) if name not in site.elsewhere]
        if site.in_stages:
            _check_kept_apart(module, here)
        there = [RecomputedUnit(module.get_submodule(name), name, is_outline=site.is_outline) for name in here]

        def remove() -> None:
            while there:
                there.pop().put_back()

        return Installed(remove=remove, objective=site.objective)

    def _check_known(self, units: Collection[str]) -> None:
        unknown = next((name for name in self.units or () if name not in units), None)
        if unknown is not None:
            raise bad_input(
                wanted="names of units of the model",
                got=repr(unknown),
                do=nearest(unknown, tuple(units)),
                key="plan.savers.recompute.units",
            )


def _check_kept_apart(module: nn.Module, units: Collection[str]) -> None:
    """Raise BadInput for a unit in stages that changes Python state: other stages repeat its changes, once."""
    changing = next((name for name in units if changes_python(module.get_submodule(name))), None)
    if changing is not None:
        raise bad_input(
            wanted="units of a stage whose forward changes no Python state, as other stages follow it",
            got=f"{changing}, whose code may change some",
            do="name other units, or write plan.savers: [recompute], which recomputes whole stages",
            key="plan.savers.recompute.units",
        )


def recomputable(module: nn.Module, units: Sequence[str]) -> tuple[str, ...]:
    """Return the units that are worth a second forward: the repeated blocks; all where there are none."""
    return block_names(module, units) or tuple(units)
