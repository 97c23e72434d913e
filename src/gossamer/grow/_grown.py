"""The loop that all methods share: parameter by parameter, dim by dim, from the structures of both models."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gossamer.grow import KEY, Grown, GrowthTask
from gossamer.grow._dim_map import DimMap, in_sequence, product
from gossamer.model.structure.dimension import Clash, Dimension
from gossamer.model.structure.model import (
    ADDED,
    FIXED,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    NORM_SCALE,
    NORM_SHIFT,
    POSITIONS,
    READS,
    STREAM,
    VOCABULARY,
    WRITES,
    ModelStructure,
)
from gossamer.model.structure.pairing import Folding, paired
from gossamer.spec.errors import BadInput, bad_input

Mixture: TypeAlias = tuple[tuple[int, float], ...]  # (block of the source, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One dimension of one dim of a target parameter, beside the same of the source.

    name, source: of the parameter in both; how: how the dim is used there; role: of the dimension; block: of the
    target, -1 outside of blocks.
    """

    name: str
    source: str
    dim: int
    how: frozenset[str]
    role: str
    before: int
    after: int
    block: int

    @property
    def is_read(self) -> bool:
        """Return whether the dim is contracted with activations, and not also written to."""
        return READS in self.how and WRITES not in self.how


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthMap:
    """The maps of one dimension: of values, and of gradients (None: moments start anew)."""

    values: DimMap
    gradients: DimMap | None = None


MapOf: TypeAlias = Callable[[Place], GrowthMap]


def grow_tensors(
    task: GrowthTask, blocks: Sequence[Mixture], map_of: MapOf, *, new_blocks: frozenset[int] = frozenset()
) -> Grown:
    """Return the target's tensors, and its moments where the maps have gradients.

    blocks: for each block of the target, the mixture of the source's blocks; new_blocks: those of them whose moments
    start anew. Raises BadInput, by name, for what has no place in the source.
    """
    tensors, moments = dict[str, Tensor](), dict[str, Tensor]()
    for name, dims in task.target.dims.items():
        block, sources = _sources(task, blocks, name)
        first = sources[0][0]
        maps = [
            _map_of_dim(task, name, first, dim, block, map_of) for dim in range(len(dims))
        ]  # by dim of the parameter
        mixed = _mixed({one: task.tensors[one] for one, _ in sources}, sources)
        found = _applied(mixed, [one.values for one in maps])
        tensors[name] = _drawn(found, mixed, maps, name, task.seed).to(task.tensors[first].dtype)
        for slot, degree in task.degrees.items():
            known = [f"{slot}/{one}" for one, _ in sources]
            if block in new_blocks or any(one.gradients is None for one in maps):
                continue
            if all(one in task.moments for one in known):
                state = _mixed({one: task.moments[f"{slot}/{one}"] for one, _ in sources}, sources)
                grads = [one.gradients for one in maps if one.gradients is not None]
                used = [one.squared() if degree == 2 else one for one in grads]
                moments[f"{slot}/{name}"] = _applied(state, used).to(torch.float32)
    if moments:
        shapes = {name: one.shape for name, one in tensors.items()}
        for slot in task.degrees:  # what starts anew beside what goes on
            for name, shape in shapes.items():
                moments.setdefault(f"{slot}/{name}", torch.zeros(shape))
    return Grown(tensors=tensors, moments=moments)


def _sources(task: GrowthTask, blocks: Sequence[Mixture], name: str) -> tuple[int, list[tuple[str, float]]]:
    """Return the target's block that holds a parameter, and the source's parameters that it comes from."""
    block, prefix = next(((i, one) for i, one in enumerate(task.target.blocks) if name.startswith(f"{one}.")), (-1, ""))
    if block < 0:
        found = [(name, 1.0)]
    else:
        found = [(f"{task.source.blocks[j]}{name[len(prefix) :]}", weight) for j, weight in blocks[block]]
    for one, _ in found:
        if one not in task.source.dims:
            raise bad_input(
                wanted=f"a source with {one}, from which {name} of the target comes",
                got="no such parameter in it",
                do="name a target of the same model type, with the same options (biases, norms, tied head)",
                key="--to",
            )
    return block, found


def _map_of_dim(task: GrowthTask, name: str, source: str, dim: int, block: int, map_of: MapOf) -> GrowthMap:
    target_dims, source_dims = task.target.dims[name], task.source.dims[source]
    if len(target_dims) != len(source_dims):
        raise _misfit(name, f"{len(source_dims)} dims in the source", f"{len(target_dims)}")
    how = task.target.how(name, dim)

    def of(before: Dimension, after: Dimension) -> GrowthMap:
        role = task.target.role(after)
        if before.size == after.size and role not in (STREAM, HEADS, HIDDEN):
            same = DimMap.identity(before.size)
            return GrowthMap(values=same, gradients=same)
        place = Place(
            name=name, source=source, dim=dim, how=how, role=role, before=before.size, after=after.size, block=block
        )
        if before.size != after.size:
            _check_resizable(task.target, place, after)
        return map_of(place)

    try:
        return paired(source_dims[dim], target_dims[dim], of, _FOLDING)
    except Clash as clash:
        raise _misfit(name, f"dim {dim} to be made of the same dimensions in both models", str(clash)) from None


def _check_resizable(structure: ModelStructure, place: Place, dim: Dimension) -> None:
    """Raise BadInput for a dimension that no growth resizes."""
    sizes = f"{place.name}: {place.role} of {place.before} in the source and {place.after} in the target"
    if not place.how:
        raise _misfit(place.name, "a parameter that the forward uses, or one of the same size", sizes)
    if place.role == VOCABULARY:
        do = "give both the same tokenizer: set vocab_size of the target to that of the source"
        raise bad_input(wanted="the same vocabulary in both models", got=sizes, do=do, key="--to")
    if place.role in (POSITIONS, HEAD_SIZE, FIXED):
        why = "; ".join(dict.fromkeys(structure.limits.get(id(dim.root), ()))) or "its elements are told apart"
        do = {
            POSITIONS: "set the target's number of positions to that of the source",
            HEAD_SIZE: "keep the size of a head, and give the target more heads (width / heads is to stay the same)",
        }.get(place.role, "keep this size")
        raise bad_input(wanted=f"the same {place.role} in both models ({why})", got=sizes, do=do, key="--to")
    normed = [norm for norm in structure.norms if any(leaf is dim.root for leaf in norm.dim.leaves())]
    if normed and place.role != STREAM:
        raise bad_input(
            wanted=f"the same size for {place.name}, over which {normed[0].name} normalizes",
            got=sizes,
            do="keep this size",
            key="--to",
        )


def _misfit(name: str, wanted: str, got: str) -> BadInput:
    do = "name a target of the same model type as the source"
    return bad_input(wanted=f"{wanted} ({name})", got=got, do=do, key="--to")


def _mixed(tensors: Mapping[str, Tensor], sources: Sequence[tuple[str, float]]) -> Tensor:
    found = sum(weight * tensors[name].double() for name, weight in sources)
    assert isinstance(found, Tensor)
    return found


def _applied(x: Tensor, maps: Sequence[DimMap]) -> Tensor:
    for dim, one in enumerate(maps):
        if not one.is_identity:
            x = one(x, dim)
    return x.clone()


def _drawn(found: Tensor, mixed: Tensor, maps: Sequence[GrowthMap], name: str, seed: int) -> Tensor:
    """Draw the elements that no output depends on, as large as the others are."""
    free = [(dim, one.values.free) for dim, one in enumerate(maps) if bool(one.values.free.any())]
    if not free:
        return found
    draw = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    noise = torch.randn(found.shape, generator=draw, dtype=found.dtype) * mixed.std()
    for dim, which in free:
        shape = [1] * found.dim()
        shape[dim] = -1
        found = torch.where(which.view(shape), noise, found)
    return found


def _fold(maps: Sequence[GrowthMap], by: Callable[[Sequence[DimMap]], DimMap]) -> GrowthMap:
    grads = [one.gradients for one in maps]
    known = [one for one in grads if one is not None]
    return GrowthMap(values=by([one.values for one in maps]), gradients=by(known) if len(known) == len(grads) else None)


_FOLDING: Folding[GrowthMap] = Folding(
    product=lambda maps: _fold(maps, product), parts=lambda maps: _fold(maps, in_sequence)
)


def check_sizes(task: GrowthTask, *, shrinks: bool) -> dict[str, Any]:
    """Return the sizes of both models; raise BadInput for a target on the wrong side of the source."""
    source, target = (sum(_numel(one) for one in side.dims.values()) for side in (task.source, task.target))
    if (target > source) if shrinks else (target < source):
        word, do = ("smaller", "grow it with another method") if shrinks else ("larger", "use coalesce to shrink it")
        raise bad_input(
            wanted=f"a target that is {word} than its source",
            got=f"{target:,} parameters, the source has {source:,}",
            do=f"name a {word} target, or {do}",
            key="--to",
        )
    return {"source_parameters": source, "target_parameters": target}


def _numel(dims: Sequence[Dimension]) -> int:
    count = 1
    for one in dims:
        count *= one.size
    return count


__all__ = ["ADDED", "KEY", "NORM_SCALE", "NORM_SHIFT", "GrowthMap", "MapOf", "Mixture", "Place", "grow_tensors"]
