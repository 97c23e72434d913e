"""Units of a run: found, or named by the user if a model has no repeated blocks, or other units are wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.jit import ScriptModule

from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest

_KEY = "plan.units"


def units_of(module: nn.Module, asked: Sequence[str] | Literal["auto"]) -> tuple[str, ...]:
    """Return the units of a model, as `plan.units` asks for them: found once, and used wherever units matter.

    A module made as a whole by torch.compile or torch.jit is one unit. Raises BadInput.
    """
    if isinstance(module, OptimizedModule | ScriptModule):
        if asked == "auto":
            return ("",)
        check_open(module, _KEY)
    return unit_names(module) if asked == "auto" else given_units(module, asked)


def check_open(module: nn.Module, key: str) -> None:
    """Raise BadInput unless the units of a module can be reached, and its forward traced."""
    if isinstance(module, OptimizedModule):
        raise bad_input(
            wanted="a module whose submodules can be reached",
            got="one that torch.compile wrapped as a whole",
            do="give the module as it is before torch.compile, and set model.compile: true, which compiles its units",
            key=key,
        )
    if isinstance(module, ScriptModule):
        raise bad_input(
            wanted="a module whose submodules can be reached",
            got="one that torch.jit made as a whole, whose forward is no Python code",
            do="give the module as it is before torch.jit; single blocks of it may be scripted or traced",
            key=key,
        )


def check_units(module: nn.Module, names: Sequence[str]) -> None:
    """Raise BadInput unless the units of a plan are modules of this model."""
    known = {name for name, _ in module.named_modules(remove_duplicate=False)}
    strange = next((name for name in names if name not in known), None)
    if strange is not None:
        raise bad_input(
            wanted=f"a plan of this model, with units {', '.join(units_of(module, 'auto')[:3])}, ...",
            got=f"a plan with the unit {strange}, which this model does not have",
            do="make a new plan (--dry-run), or train without the plan file",
            key=_KEY,
        )


def given_units(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the named modules, and for all other parameters the largest children that hold none of them.

    They are in order of registration, each module once. Raises BadInput for a name of no module, of one that cannot be
    called (a list of modules), or of one inside another.
    """
    known = dict(module.named_modules(remove_duplicate=False))
    named = dict.fromkeys(names)
    for name in named:
        _check(known, name, named)
    wanted = {id(known[name]): name for name in named}
    found: dict[int, str] = {}
    for path in _frontier(module, "", wanted.keys()):
        unit = known[path]
        found.setdefault(id(unit), wanted.get(id(unit), path))  # a shared module is one unit
    return tuple(found.values())


def _check(known: Mapping[str, nn.Module], name: str, named: Iterable[str]) -> None:
    if not name or name not in known:
        raise BadInput(f"there is no module {name!r}: {nearest(name, [n for n in known if n])}", key=_KEY)
    if not _can_be_called(known[name]):
        children = [f"{name}.{child}" for child, _ in known[name].named_children()]
        raise bad_input(
            wanted="modules with a forward",
            got=f"{name}, a {type(known[name]).__name__}, which has no forward",
            do=f"name the modules in it ({', '.join(children[:3]) or 'there are none'})",
            key=_KEY,
        )
    for other in named:
        if other != name and any(inner is known[name] for inner in known.get(other, nn.Module()).modules()):
            how = "which are the same module" if known[other] is known[name] else f"which is inside {other}"
            raise bad_input(
                wanted="modules none of which is inside another",
                got=f"{other} and {name}, {how}",
                do="name only one of them",
                key=_KEY,
            )


def _frontier(module: nn.Module, path: str, wanted: Collection[int]) -> Iterator[str]:
    for name, child in module.named_children():  # of two names in one module, the first alone
        at = f"{path}.{name}" if path else name
        if id(child) in wanted:
            yield at
        elif any(id(inner) in wanted for inner in child.modules()) or not _can_be_called(child):
            yield from _frontier(child, at, wanted)
        elif any(True for _ in child.parameters()):
            yield at


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
