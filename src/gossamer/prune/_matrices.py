"""The matrices of a model that a pruning goes through, found by the structure of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gossamer.model.adapter import adapter_tensors
from gossamer.model.quantized_linear import is_conv1d, quantized_layers
from gossamer.model.unit_walk import is_inside, walked_units
from gossamer.model.units import block_names
from gossamer.prune._experts import (
    FusedExperts,
    ListedExperts,
    fused_experts,
    is_fused,
    is_linear,
    listed_experts,
    routers,
)
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix (out, in) of a linear layer, or of one expert in a fused parameter.

    `name`: the path of its layer, for an expert in a fused parameter that of the parameter and the expert's number;
    `parameter`: its canonical name; `weight`: a view of the parameter, which holds (in, out) where `is_turned`;
    `layer`: the path of the module that is called.
    """

    name: str
    parameter: str
    weight: Tensor
    layer: str
    is_turned: bool = False

    def as_held(self, mask: Tensor) -> Tensor:
        """Return a mask (out, in) in the layout of the parameter."""
        return mask.t() if self.is_turned else mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The matrices to prune, and the modules in which they are observed.

    `linears`: linear layers by path; `fused`: fused experts; `listed`: lists of experts. `left_out`: matrices in the
    blocks that stay as they are, with why.
    """

    matrices: tuple[Matrix, ...]
    linears: dict[str, nn.Module]
    fused: tuple[FusedExperts, ...]
    listed: tuple[ListedExperts, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the paths of the modules that are called with what the matrices see, in the order of the matrices."""
        return tuple(dict.fromkeys(one.layer for one in self.matrices))

    def within(self, layers: Sequence[str]) -> Found:
        """Return what is found in these modules."""
        chosen = set(layers)
        linears = {path: one for path, one in self.linears.items() if path in chosen}
        return replace(
            self,
            matrices=tuple(one for one in self.matrices if one.layer in chosen),
            linears=linears,
            fused=tuple(one for one in self.fused if one.path in chosen),
            listed=tuple(one for one in self.listed if any(path.startswith(f"{one.path}.") for path in linears)),
        )

    def units(self, module: nn.Module) -> tuple[str, ...]:
        """Return the paths of the units to go through. A block that routes tokens to experts takes the place of units
        inside of it: its router's weights are known when it ends.
        """
        found = dict.fromkeys(walked_units(module))
        for one in self.listed:
            block = one.path.rpartition(".")[0]
            if any(is_inside(unit, one.path) for unit in found):
                found = dict.fromkeys(block if is_inside(unit, block) else unit for unit in found)
        return tuple(found)


def find(module: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> Found:
    """Return the matrices of `module` in whose path a pattern of `include` is found, and none of `exclude`.

    Without `include`: those of linear layers and experts in the repeated blocks (in the whole model, if it has none),
    but not the output embedding, layers whose weight is another module's too, and routers. Raises BadInput for a
    pattern that finds nothing, for an adapter or quantized layers, and for what cannot be pruned, by name.
    """
    _check_plain(module)
    names = {id(one): name for name, one in module.named_parameters()}
    named = dict(module.named_modules())
    linears = {path: one for path, one in named.items() if is_linear(one)}
    fused = {one.path: one for one in fused_experts(module)}
    parts = {f"{at.path}.{name}" if at.path else name: at for at in fused.values() for name in at.parameters}
    unknown = {path: one for path, one in named.items() if is_fused(one) and path not in fused}
    if not linears and not fused and not unknown:
        raise bad_input(
            wanted="a model with linear layers (torch.nn.Linear, or transformers' Conv1D)",
            got=f"none inside of a {type(module).__name__}",
            do="prune another model",
            key="prune",
        )
    known = [*linears, *parts, *unknown]
    chosen = _matching(known, include, key="include") if include else _in_blocks(module, known)
    gone = set(_matching(known, exclude, key="exclude"))
    stays = {path: "excluded" for path in chosen if path in gone}
    if not include:
        stays |= {path: why for path, why in _left_out(module, linears).items() if path in chosen}
    chosen = [path for path in chosen if path not in stays]
    for path in chosen:
        if path in unknown:
            raise _unobserved(path, unknown[path])
    matrices: dict[str, Matrix] = {}
    for path in chosen:
        for one in _of_linear(path, linears[path], names) if path in linears else _of_fused(path, parts[path], names):
            matrices[one.name] = one
    if not matrices:
        got = f"none: {', '.join(sorted(set(stays.values()))) or 'there is none in the repeated blocks'}"
        raise bad_input(wanted="layers to prune", got=got, do="include some by name", key="prune")
    _check_once(matrices)
    return Found(
        matrices=tuple(matrices.values()),
        linears={path: linears[path] for path in chosen if path in linears},
        fused=tuple(at for at in fused.values() if any(parts.get(path) is at for path in chosen)),
        listed=tuple(one for one in listed_experts(module) if any(p.startswith(f"{one.path}.") for p in chosen)),
        left_out=tuple(stays.items()),
    )


def _check_plain(module: nn.Module) -> None:
    """Raise BadInput for a model with an adapter or with quantized layers."""
    held = "an adapter" if next(adapter_tensors(module), None) is not None else None
    held = held or ("layers in quantized blocks" if quantized_layers(module) else None)
    if held:
        raise bad_input(
            wanted="a model whose own weights are there, to prune",
            got=f"one with {held}",
            do="export it merged (gossamer export RUN --to hf FOLDER), and prune that folder",
            key="prune",
        )


def _matching(known: Sequence[str], patterns: Sequence[str], *, key: str) -> list[str]:
    """Return the paths in which a pattern is found; raise BadInput for one that finds none."""
    found: set[str] = set()
    for pattern in patterns:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise BadInput(f"{pattern!r} is no regular expression: {error}", key=key) from None
        matched = [path for path in known if wanted.search(path)]
        if not matched:
            ends = sorted({path.rpartition(".")[2] for path in known})
            raise BadInput(f"no linear layer is called {pattern!r}: {nearest(pattern, ends)}", key=key)
        found |= set(matched)
    return [path for path in known if path in found]


def _in_blocks(module: nn.Module, known: Sequence[str]) -> list[str]:
    """Return the paths that lie in repeated blocks; all of them if none does."""
    blocks = block_names(module)
    prefixes = tuple(f"{name}." for name in blocks)
    return [path for path in known if path.startswith(prefixes) or path in blocks] or list(known)


def _left_out(module: nn.Module, linears: dict[str, nn.Module]) -> dict[str, str]:
    """Return the linear layers that are not pruned unless they are included by name, with why."""
    places: dict[int, set[int]] = {}
    for inner in module.modules():
        for one in inner._parameters.values():
            if one is not None:
                places.setdefault(id(one), set()).add(id(inner))
    head_of = getattr(module, "get_output_embeddings", None)
    head, router = head_of() if callable(head_of) else None, routers(module)
    found = {}
    for path, linear in linears.items():
        weight = linear._parameters.get("weight")
        if linear is head:
            found[path] = "the output embedding"
        elif linear in router:
            found[path] = router[linear]
        elif weight is not None and len(places[id(weight)]) > 1:
            found[path] = "its weight is another module's too"
    return found


def _of_linear(path: str, linear: nn.Module, names: dict[int, str]) -> list[Matrix]:
    weight = linear._parameters.get("weight")
    if weight is None:
        raise bad_input(
            wanted="a linear layer with a weight of its own",
            got=f"{path}, whose weight is computed from other tensors",
            do="remove the parametrization, or exclude the layer",
            key="exclude",
        )
    turned = is_conv1d(linear)
    held = weight.detach()
    return [Matrix(path, names[id(weight)], held.t() if turned else held, path, turned)]


def _of_fused(path: str, at: FusedExperts, names: dict[int, str]) -> list[Matrix]:
    inside: Any = at.module
    weight = inside._parameters[path.rpartition(".")[2]]
    turned = bool(inside.is_transposed)
    held = weight.detach().transpose(1, 2) if turned else weight.detach()
    return [Matrix(f"{path}[{number}]", names[id(weight)], one, at.path, turned) for number, one in enumerate(held)]


def _check_once(matrices: dict[str, Matrix]) -> None:
    """Raise BadInput for two layers that share a weight: one mask cannot follow the inputs of both."""
    first: dict[str, str] = {}
    for one in matrices.values():
        at = one.name.partition("[")[0]
        if first.setdefault(one.parameter, at) != at:
            raise bad_input(
                wanted="layers with a weight of their own",
                got=f"{first[one.parameter]} and {one.name}, which share theirs",
                do="exclude them",
                key="exclude",
            )


def _unobserved(path: str, module: nn.Module) -> BadInput:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    held = next(name for name, one in module._parameters.items() if one is not None and one.dim() == 3)
    return bad_input(
        wanted="experts in linear layers, or fused as transformers' interface for experts says",
        got=f"{path}.{held}, a parameter with three dimensions of a {kind}, whose use cannot be observed",
        do="exclude it",
        key="exclude",
    )
