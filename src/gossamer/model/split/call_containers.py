"""Lists and dicts that a unit call may add tensors to: among its arguments, and as attributes of modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from gossamer.model.split.dataflow import KEPT, SideOutput, UnitCall, containers_of


@dataclass(frozen=True, slots=True)
class CallContainers:
    """The lists and dicts that a unit call may add tensors to, with their lengths before the call."""

    given: list[Any]  # among its arguments
    lengths: list[int]  # of these
    kept: dict[tuple[str, str], int]  # module and attribute -> length

    @staticmethod
    def before(module: nn.Module, call: UnitCall, given: Any) -> CallContainers:
        """Return the containers of a call that is about to begin with the arguments `given`."""
        containers = containers_of(given)
        return CallContainers(containers, [len(container) for container in containers], kept_lengths(module, call))


def kept_lengths(module: nn.Module, call: UnitCall) -> dict[tuple[str, str], int]:
    """Return the lengths of the lists and dicts of modules that a call may put tensors into."""
    places = {(i.module, i.attribute) for i in call.insides if i.container == KEPT}
    return {place: len(_kept_at(module, *place) or ()) for place in places}


def added_elements(
    module: nn.Module, call: UnitCall, lengths: dict[tuple[str, str], int]
) -> Iterator[tuple[SideOutput, Any, Any]]:
    """Yield each side output with its list or dict and its key; None if the call added nothing this time."""
    for inside in (i for i in call.insides if i.container == KEPT):
        place = inside.module, inside.attribute
        container, key = _kept_at(module, *place), inside.key
        if isinstance(container, list):
            key = lengths[place]
            lengths[place] += 1
        is_there = key in range(len(container)) if isinstance(container, list) else key in (container or ())
        yield inside, container if is_there else None, key


def _kept_at(module: nn.Module, path: str, attribute: str) -> Any:
    found = vars(module.get_submodule(path)).get(attribute)  # not by getattr, which checks for old values
    return found if isinstance(found, list | dict) else None
