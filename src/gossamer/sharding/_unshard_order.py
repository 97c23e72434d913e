"""Order of unsharding in a step: which units of the model are all-gathered together, in which order, and when.

A window of two units, the running one and the next one, moves over the model, forward and backward with every
micro-batch. At either end the other neighbor is the next one, which is unsharded already. Parameters that are read
outside of their unit, or lie in no unit, stay unsharded for the whole step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gossamer.comm.bucket import Layout
from gossamer.comm.message import Traffic
from gossamer.sharding._gather_updates import collecting, longest_message_numel
from gossamer.sharding._row_partition import RowPartition

LEVEL = "parameters"  # groups of their own: parameters do not wait behind gradients


@dataclass(frozen=True, slots=True)
class UnshardUnit:
    """A unit of the model whose parameters are gathered at once, with one layout per type.

    `goes_back`: whether the backward pass runs through it.
    """

    name: str
    layouts: tuple[Layout, ...]
    goes_back: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Return the names of its parameters."""
        return frozenset(e.name for layout in self.layouts for e in layout.entries)


@dataclass(frozen=True, slots=True)
class UnitVisit:
    """The forward or backward pass of the unit `index`; `gathered`: the units that it begins to gather, in order."""

    index: int
    is_forward: bool
    gathered: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnshardOrder:
    """The order in which the units of a model are unsharded.

    `always`: the parameters that stay unsharded for the whole step; `units`: the others, in the order in which they
    run. `tiled`: those of all that are read tile by tile, and by nothing but their layer.
    """

    always: UnshardUnit
    units: tuple[UnshardUnit, ...]
    tiled: tuple[str, ...] = ()

    @staticmethod
    def of(
        module: nn.Module, units: Sequence[str], loose: Collection[str] = (), *, absent: Collection[str] = ()
    ) -> UnshardOrder:
        """Build the order of `units` of `module`, given as they run. `loose`: parameters read outside of their unit.

        `absent`: those that lie on other stages; units that have no others are left out.
        """
        places: dict[int, set[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            places.setdefault(id(param), set()).add(unit_of(name, units))
        params = {name: p for name, p in module.named_parameters() if name not in absent}
        held: dict[str, dict[str, Tensor]] = {"": {}, **{unit: {} for unit in units}}
        for name, param in params.items():
            own = unit_of(name, units)
            held["" if name in loose or len(places[id(param)]) > 1 else own][name] = param
        first = next((i for i, u in enumerate(units) if any(p.requires_grad for p in held[u].values())), 0)
        first = 0 if any(p.requires_grad for p in held[""].values()) else first
        found = tuple(UnshardUnit(u, layouts_of(held[u]), i >= first) for i, u in enumerate(units) if u and held[u])
        return UnshardOrder(UnshardUnit("", layouts_of(held[""])), found)

    def through(self, backward: Collection[str]) -> UnshardOrder:
        """Return the same order, where the backward pass runs through the units named."""
        return replace(self, units=tuple(replace(u, goes_back=u.name in backward) for u in self.units))

    def without_tiled(self, params: Mapping[str, Tensor]) -> UnshardOrder:
        """Return the order of the parameters that are needed whole, of the module's `params`."""

        def whole(unit: UnshardUnit) -> UnshardUnit:
            names = [entry.name for layout in unit.layouts for entry in layout.entries if entry.name not in self.tiled]
            return replace(unit, layouts=layouts_of({name: params[name] for name in names}))

        return replace(self, always=whole(self.always), units=tuple(map(whole, self.units)))

    def gathers(self, microbatches: int) -> Iterator[UnshardUnit]:
        """Yield the units that a step gathers, in order."""
        yield self.always
        for visit in self.visits(microbatches):
            yield from (self.units[i] for i in visit.gathered)

    def visits(self, microbatches: int) -> Iterator[UnitVisit]:
        """Yield what a step runs, in order, with the units whose gather begins before each."""
        there: tuple[int, ...] = ()
        for index, is_forward in [step for _ in range(microbatches) for step in self._there_and_back()]:
            wanted = window(index, len(self.units), is_forward=is_forward)
            yield UnitVisit(index, is_forward, tuple(i for i in wanted if i not in there))
            there = wanted

    def _there_and_back(self) -> list[tuple[int, bool]]:
        indices = range(len(self.units))
        return [(i, True) for i in indices] + [(i, False) for i in reversed(indices) if self.units[i].goes_back]

    def traffic(self, deal: RowPartition, rank: int, microbatches: int) -> Iterator[Traffic]:
        """Yield the messages of a step's all-gathers, for parameters sharded by `deal`."""
        for unit in self.gathers(microbatches):
            yield from unit_traffic(unit, deal, rank)


def unit_traffic(unit: UnshardUnit, deal: RowPartition, rank: int) -> Iterator[Traffic]:
    """Yield the messages that gather a unit once, for parameters sharded by `deal`."""
    for layout in unit.layouts:
        yield from collecting(deal, rank, longest_message_numel(layout, deal, rank), layout.dtype.itemsize)


def window(index: int, units: int, *, is_forward: bool) -> tuple[int, ...]:
    """Return the units to keep unsharded while unit `index` runs, itself first."""
    following = index + 1 if is_forward else index - 1
    if not 0 <= following < units:
        following = 2 * index - following
    return (index, following) if 0 <= following < units else (index,)


def unit_of(name: str, units: Sequence[str]) -> str:
    """Return the unit that a parameter lies in; "" for none."""
    return next((u for u in units if u and (name == u or name.startswith(f"{u}."))), "")


def layouts_of(params: Mapping[str, Tensor]) -> tuple[Layout, ...]:
    """Return one layout for each type and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, param in params.items():
        kinds.setdefault((param.dtype, param.device), {})[name] = param
    return tuple(Layout.of(held) for held in kinds.values())
