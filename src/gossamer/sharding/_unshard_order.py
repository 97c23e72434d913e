"""The walk of a step through a model whose parameters are sharded: what is gathered together, in which order, and when.

A window of two units, the one that runs and the next one, moves over the model, forth and back with every micro-batch.
At either end the other neighbour is the next one, and is there already. What is read outside of its own unit, or lies
in none, is there for the whole of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gossamer.comm.bucket import Layout
from gossamer.comm.message import Traffic
from gossamer.sharding._gather_updates import collecting, longest
from gossamer.sharding._row_partition import RowPartition

LEVEL = "parameters"  # groups of their own: what is gathered does not wait behind gradients


@dataclass(frozen=True, slots=True)
class UnshardUnit:
    """What is gathered at once, one layout for each type. `goes_back`: whether backward comes through it."""

    name: str
    layouts: tuple[Layout, ...]
    goes_back: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Of its parameters."""
        return frozenset(e.name for layout in self.layouts for e in layout.entries)


@dataclass(frozen=True, slots=True)
class UnshardOrder:
    """`always`: what is there for the whole of a step; `units` in the order in which they run."""

    always: UnshardUnit
    units: tuple[UnshardUnit, ...]

    @staticmethod
    def of(module: nn.Module, units: Sequence[str], loose: Collection[str] = ()) -> UnshardOrder:
        """`units` of `module`, in order. `loose`: parameters that are read outside of their unit."""
        places: dict[int, set[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            places.setdefault(id(param), set()).add(unit_of(name, units))
        params = dict(module.named_parameters())
        held: dict[str, dict[str, Tensor]] = {"": {}, **{unit: {} for unit in units}}
        for name, param in params.items():
            own = unit_of(name, units)
            held["" if name in loose or len(places[id(param)]) > 1 else own][name] = param
        first = next((i for i, u in enumerate(units) if any(p.requires_grad for p in held[u].values())), 0)
        first = 0 if any(p.requires_grad for p in held[""].values()) else first
        found = tuple(UnshardUnit(u, layouts_of(held[u]), i >= first) for i, u in enumerate(units) if u and held[u])
        return UnshardOrder(UnshardUnit("", layouts_of(held[""])), found)

    def through(self, backward: Collection[str]) -> UnshardOrder:
        """The same, where backward comes through the units named."""
        return replace(self, units=tuple(replace(u, goes_back=u.name in backward) for u in self.units))

    def gathers(self, microbatches: int) -> Iterator[UnshardUnit]:
        """Of a step, one by one."""
        yield self.always
        there: tuple[int, ...] = ()
        for index, is_forward in [step for _ in range(microbatches) for step in self._there_and_back()]:
            wanted = window(index, len(self.units), is_forward=is_forward)
            yield from (self.units[i] for i in wanted if i not in there)
            there = wanted

    def _there_and_back(self) -> list[tuple[int, bool]]:
        indices = range(len(self.units))
        return [(i, True) for i in indices] + [(i, False) for i in reversed(indices) if self.units[i].goes_back]

    def traffic(self, deal: RowPartition, rank: int, microbatches: int) -> Iterator[Traffic]:
        """What the gathers of a step send of parameters that are dealt out so."""
        for unit in self.gathers(microbatches):
            for layout in unit.layouts:
                yield from collecting(deal, rank, longest(layout, deal, rank), layout.dtype.itemsize)


def window(index: int, units: int, *, is_forward: bool) -> tuple[int, ...]:
    """Which units are to be there when number `index` of them runs, itself first."""
    following = index + 1 if is_forward else index - 1
    if not 0 <= following < units:
        following = 2 * index - following
    return (index, following) if 0 <= following < units else (index,)


def unit_of(name: str, units: Sequence[str]) -> str:
    """The one that a parameter lies in; "" for none."""
    return next((u for u in units if u and (name == u or name.startswith(f"{u}."))), "")


def layouts_of(params: Mapping[str, Tensor]) -> tuple[Layout, ...]:
    """One for each type and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, param in params.items():
        kinds.setdefault((param.dtype, param.device), {})[name] = param
    return tuple(Layout.of(held) for held in kinds.values())
