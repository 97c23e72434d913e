"""Goes through a model unit by unit, so that a unit's inputs are what the changed units before it give.

A unit's layers are observed in forwards of the whole model, which end where the unit has been: what a model computes
between its units, and how it calls them, is its own. Work for n units in a row: one forward, which says their order,
and (n + 1) / 2 forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from gossamer.model.layer_input import layer_input
from gossamer.model.units import block_names, unit_names

Forward = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayers:
    """Layers in one unit: those that are called, in the order of their first calls, then the others.

    `unit`: its path, "" for layers outside of all units; `ends`: no forward calls the unit twice, or these layers
    outside of it, so that a forward that observes them may end with it.
    """

    unit: str
    names: tuple[str, ...]
    ends: bool


def walked_units(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the units to go through: those of a model with repeated blocks; another one is a unit."""
    units = unit_names(module)
    return units if block_names(module, units) else ("",)


def unit_layers(
    module: nn.Module, names: Sequence[str], forwards: Sequence[Forward], units: Sequence[str]
) -> tuple[UnitLayers, ...]:
    """Return the layers `names` of `module` by unit, in the order in which the forwards first call them.

    Units without a call come last. Runs each of the forwards once.
    """
    holder = {name: next((unit for unit in units if is_inside(name, unit)), "") for name in names}
    seen = _Calls(holder=holder)
    for forward in forwards:
        seen.observe(module, forward)
    called = [*seen.order, *(name for name in names if name not in seen.order)]
    return tuple(
        UnitLayers(
            unit=unit,
            names=tuple(name for name in called if holder[name] == unit),
            ends=unit != "" and unit not in seen.goes_on,
        )
        for unit in dict.fromkeys(holder[name] for name in called)
    )


def run_to(module: nn.Module, layers: UnitLayers, forwards: Sequence[Forward]) -> None:
    """Run the forwards as far as these layers need it, under the hooks that the caller has put in."""
    for forward in forwards:
        with ExitStack() as stack, suppress(_Enough):
            if layers.ends:
                stack.callback(module.get_submodule(layers.unit).register_forward_hook(_enough).remove)
            forward()


@contextmanager
def listening(module: nn.Module, names: Sequence[str], heard: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Call `heard` with the name and the input of every call of these linear layers, inside the `with` block."""

    def hear(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        heard(name, layer_input(args, kwargs))

    with ExitStack() as stack:
        for name in names:
            layer = module.get_submodule(name)
            stack.callback(layer.register_forward_pre_hook(partial(hear, name), with_kwargs=True).remove)
        yield


def is_inside(name: str, unit: str) -> bool:
    """Return whether the path `name` is that of the module `unit`, or of one in it."""
    return unit == "" or name == unit or name.startswith(f"{unit}.")


@dataclass(slots=True, kw_only=True, eq=False)
class _Calls:
    """What forwards call. `holder`: the unit of each layer; `order`: layers by their first call; `goes_on`: units that
    a forward calls twice, or whose layers it calls outside of them.
    """

    holder: Mapping[str, str]
    order: dict[str, None] = field(default_factory=dict)
    goes_on: set[str] = field(default_factory=set)

    def observe(self, module: nn.Module, forward: Forward) -> None:
        """Run a forward, and take its calls."""
        begun, ended = Counter[str](), Counter[str]()

        def begin(unit: str, *_: object) -> None:
            begun[unit] += 1
            if begun[unit] > 1:
                self.goes_on.add(unit)

        def end(unit: str, *_: object) -> None:
            ended[unit] += 1

        def call(name: str, *_: object) -> None:
            self.order.setdefault(name)
            if begun[self.holder[name]] == ended[self.holder[name]]:
                self.goes_on.add(self.holder[name])

        with ExitStack() as stack:
            for unit in sorted(set(self.holder.values())):  # before their layers: a layer may be a unit itself
                inside = module.get_submodule(unit)
                stack.callback(inside.register_forward_pre_hook(partial(begin, unit)).remove)
                stack.callback(inside.register_forward_hook(partial(end, unit)).remove)
            for name in self.holder:
                stack.callback(module.get_submodule(name).register_forward_pre_hook(partial(call, name)).remove)
            forward()


class _Enough(BaseException):
    """Ends a forward after the unit that was observed; no code of a model catches it."""


def _enough(*_: object) -> None:
    raise _Enough
