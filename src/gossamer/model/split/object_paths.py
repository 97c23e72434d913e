"""Paths to Python objects: which attributes of modules lead to an object, and what else does."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import BuiltinMethodType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.python_state.record import Root
from gossamer.model.snapshot import Snapshot

_OURS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
_KINDS = (
    ModuleType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    Tensor,
    nn.Module,
    type,
    torch.dtype,
    torch.device,
)


def ways_to(
    wanted: Collection[int], module: nn.Module, ignored: Collection[str], until: Any
) -> dict[int, frozenset[Root | None]]:
    """Return, for each object id in `wanted`, the attributes of modules through which the object can be reached.

    None is for state outside of modules: globals and classes that the code of `module` names, and local variables of
    the functions that are running. Of these, only functions up to the one whose code is `until` count (None: the
    forward is over, no local variable counts). `ignored`: names of attributes to skip.
    """
    found: dict[int, set[Root | None]] = {key: set() for key in wanted}
    for inner in module.modules():
        for name, held in vars(inner).items():
            if name not in ignored:
                for key in reachable_ids(held) & found.keys():
                    found[key].add((id(inner), name))
    outside = {id(held) for held in Snapshot.of_classes(module).found()}
    for key in found.keys() & outside:
        found[key].add(None)
    for held in _variables(sys._getframe(1), until) if until is not None else ():
        for key in reachable_ids(held) & found.keys():
            found[key].add(None)
    return {key: frozenset(ways) for key, ways in found.items()}


def _variables(frame: FrameType | None, until: Any) -> Iterator[Any]:
    while frame is not None and frame.f_code is not until:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield from frame.f_locals.values()
        frame = frame.f_back


def reachable_ids(held: Any) -> set[int]:
    """Return the ids of the objects that can be reached from `held` without going through a module."""
    found, waiting = set[int](), [held]
    while waiting:
        one = waiting.pop()
        if not issubclass(type(one), _KINDS) and id(one) not in found:
            found.add(id(one))
            waiting += _parts(one)
    return found


def _parts(held: Any) -> Sequence[Any]:
    kind = type(held)  # and not the class that it says it has
    inside = getattr(held, "__dict__", None)
    if issubclass(kind, dict):
        return [inside, *dict.keys(held), *dict.values(held)]
    if issubclass(kind, list | tuple | set | frozenset | deque):  # others may load something when they are asked
        return [inside, *held]
    if kind in (MethodType, BuiltinMethodType):
        return [held.__self__]
    if issubclass(kind, partial):
        return [held.func, held.args, held.keywords]
    if kind is FunctionType:
        cells = [cell for cell in held.__closure__ or () if _is_filled(cell)]
        return [held.__defaults__, held.__kwdefaults__, vars(held), *(cell.cell_contents for cell in cells)]
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    return [inside, *(getattr(held, name, None) for name in names)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
