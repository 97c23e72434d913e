"""A model in fragments that are exchanged one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def fragments_of(params: Mapping[str, Tensor], fragments: int, units: Sequence[str] = ()) -> list[list[str]]:
    """The names of `params` in at most so many fragments of about equal bytes, each in the order of the parameters.

    What belongs to one unit (a block) stays together. The largest unit goes first, each where there is least: blocks
    that are alike are dealt out in turn, a strided pattern as in Streaming DiLoCo. There are fewer fragments where
    there are fewer units.
    """
    held: dict[str, list[str]] = {}
    for name in params:
        held.setdefault(_unit_of(name, units), []).append(name)
    size = {unit: sum(params[n].nbytes for n in names) for unit, names in held.items()}
    bins: list[list[str]] = [[] for _ in range(min(fragments, len(held)))]
    loads = [0] * len(bins)
    for unit in sorted(held, key=lambda unit: -size[unit]):
        least = loads.index(min(loads))
        loads[least] += size[unit]
        bins[least] += held[unit]
    position = {name: i for i, name in enumerate(params)}
    return [sorted(names, key=position.__getitem__) for names in bins]


def _unit_of(name: str, units: Sequence[str]) -> str:
    """The innermost unit that holds a parameter, or the module that owns it."""
    inside = [unit for unit in units if name.startswith(f"{unit}.")]
    return max(inside, key=len) if inside else name.rpartition(".")[0]
