"""Units: the repeated blocks of a model, and every other child that owns parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

_SHARE = 0.03  # a list with a smaller fraction of the parameters is a part of a unit


def unit_names(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the units, in order of registration, each module once.

    Blocks are the children of a ModuleList of two or more that holds over 3% of the parameters. The outermost list
    counts; a list in a list is not a unit, but its children are. If no list is large enough, a ModuleDict of modules of
    one class takes its place. Then come containers that run their children one after the other (nn.Sequential), then a
    ModuleList of one: a block that may be called many times. A model without any of these has its children that own
    parameters as units, and a model without children is a unit itself (""). A model with only one unit has the units of
    that one.
    """
    found: dict[int, str] = {}
    for path in _paths(module):
        found.setdefault(id(module.get_submodule(path)), path)  # a shared module is one unit
    return tuple(found.values()) or ("",)


def _paths(module: nn.Module) -> list[str]:
    total = sum(p.numel() for p in module.parameters())
    for kind, length in ((nn.ModuleList, 2), (nn.ModuleDict, 2), (nn.Sequential, 2), (nn.ModuleList, 1)):
        lists = set(_lists(module, "", _SHARE * total, kind, length))
        if lists:
            break
    paths = [*_frontier(module, "", lists)]
    if len(paths) == 1 and len(inner := _paths(module.get_submodule(paths[0]))) > 1:
        return [f"{paths[0]}.{path}" for path in inner]
    return paths


def block_names(module: nn.Module, units: Sequence[str] = ()) -> tuple[str, ...]:
    """Return those of `units` (default: `unit_names`) that are repeated blocks.

    A block is in a ModuleList, or in a ModuleDict of two or more modules of one class.
    """
    held = ((n, module.get_submodule(n.rpartition(".")[0])) for n in units or unit_names(module) if n)
    return tuple(n for n, at in held if isinstance(at, nn.ModuleList) or _is_list(at, nn.ModuleDict, 2))


def _lists(module: nn.Module, path: str, least: float, kind: type[nn.Module], length: int) -> Iterator[str]:
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if _is_list(child, kind, length) and _size(child) > least:
            yield at
        else:
            yield from _lists(child, at, least, kind, length)


def _is_list(module: nn.Module, kind: type[nn.Module], length: int) -> bool:
    children = [*module.children()]
    is_mixed = kind is nn.ModuleDict and len({type(child) for child in children}) > 1
    return isinstance(module, kind) and len(children) >= length and not is_mixed


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _frontier(module: nn.Module, path: str, lists: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if at in lists:
            yield from _elements(child, at)
        elif any(inner.startswith(at + ".") for inner in lists):
            yield from _frontier(child, at, lists)
        elif any(True for _ in child.parameters()):
            yield at


def _elements(container: nn.Module, path: str) -> Iterator[str]:
    """Yield the paths of a list's children; children that are lists themselves are replaced by theirs."""
    for name, child in container.named_children():
        at = f"{path}.{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _elements(child, at)
        elif isinstance(container, nn.ModuleList) or any(True for _ in child.parameters()):
            yield at
