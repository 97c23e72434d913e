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
    """Return the target's tensors, the epsilon of its norms, and its moments where the maps have gradients.

    blocks: for each block of the target, the mixture of the source's blocks; new_blocks: those of them whose moments
    start anew. A second moment without a source is the mean of its tensor's: the number of updates, which is that of
    the source, would make steps of a 0 there far too large. Raises BadInput, by name, for what has no place in the
    other model.
    """
    tensors, moments = dict[str, Tensor](), dict[str, Tensor]()
    fresh = dict[str, Tensor]()  # moments of tensors that start anew, in case that others go on
    used = set[str]()
    for name, dims in task.target.dims.items():
        block, sources = _sources(task, blocks, name)
        used |= {one for one, _ in sources}
        first = sources[0][0]
        maps = [
            _map_of_dim(task, name, first, dim, block, map_of) for dim in range(len(dims))
        ]  # by dim of the parameter
        mixed = _mixed({one: task.tensors[one] for one, _ in sources}, sources)
        found = _applied(mixed, [one.values for one in maps])
        tensors[name] = _drawn(found, mixed, maps, name, task.seed).to(task.tensors[first].dtype)
        grads = [one.gradients for one in maps if one.gradients is not None]
        is_new = block in new_blocks or len(grads) < len(maps)
        for slot, degree in task.degrees.items():
            if any(f"{slot}/{one}" not in task.moments for one, _ in sources):
                continue
            state = _mixed({one: task.moments[f"{slot}/{one}"] for one, _ in sources}, sources)
            if is_new:
                fill = state.mean() if degree == 2 else state.new_zeros(())
                fresh[f"{slot}/{name}"] = fill.expand(found.shape).to(torch.float32, copy=True)
            else:
                moment = _second_moment(state, grads) if degree == 2 else _applied(state, grads)
                moments[f"{slot}/{name}"] = moment.to(torch.float32)
    more = inherited(task, lambda name: _sources(task, blocks, name)[1])
    used |= {one for name in more.tensors for one, _ in _sources(task, blocks, name)[1]}
    if lost := sorted((task.source.dims.keys() | task.source.buffers.keys()) - used):
        raise _misfit(lost[0], "a place in the target for all that the source has", f"none for {lost[0]}")
    return Grown(tensors={**tensors, **more.tensors}, moments={**fresh, **moments} if moments else {}, eps=more.eps)


def inherited(task: GrowthTask, sources_of: Callable[[str], Sequence[tuple[str, float]]]) -> Grown:
    """Return what every target has of its source: persistent buffers, and the epsilon of norms.

    sources_of: the source's tensors, with weights, from which one of the target comes. Raises BadInput, by name, for a
    buffer of another shape, for values that cannot be mixed, and for epsilons that differ where one is wanted.
    """
    tensors = dict[str, Tensor]()
    for name, shape in task.target.buffers.items():
        sources = sources_of(name)
        found = {one: task.tensors[one] for one, _ in sources}
        first = found[sources[0][0]]
        if tuple(first.shape) != shape:
            do = "keep the sizes that it depends on, or do not register it as persistent"
            raise _misfit(name, f"a buffer of {tuple(first.shape)}, as in the source", f"{shape}", do=do)
        if all(torch.equal(first, one) for one in found.values()):
            tensors[name] = first.clone()
        elif first.is_floating_point():
            tensors[name] = _mixed(found, sources).to(first.dtype)
        else:
            raise _misfit(name, "equal whole numbers in the buffers that become one", f"others in {', '.join(found)}")
    known, eps = {one.weight: one.eps for one in task.source.norms}, dict[str, float]()
    for norm in task.target.norms:
        if not norm.weight:
            continue
        values = {known.get(one) for one, _ in sources_of(norm.weight)}
        value = values.pop()
        if values or value is None:
            got = "no norm" if value is None else f"{value:g} and {', '.join(map(str, values))}"
            raise _misfit(norm.weight, "one epsilon in the norms of the source that become one", got)
        eps[norm.weight] = value
    plain = [{one.eps for one in side.norms if not one.weight} for side in (task.source, task.target)]
    if plain[0] != plain[1]:
        got = " and ".join(", ".join(f"{one:g}" for one in sorted(side)) or "none" for side in plain)
        do = "give the target the source's epsilon"
        raise _misfit("norms without a weight", "the same epsilon in both models", got, do=do)
    return Grown(tensors=tensors, eps=eps)


def _sources(task: GrowthTask, blocks: Sequence[Mixture], name: str) -> tuple[int, list[tuple[str, float]]]:
    """Return the target's block that holds a tensor, and the source's tensors that it comes from."""
    block, prefix = next(((i, one) for i, one in enumerate(task.target.blocks) if name.startswith(f"{one}.")), (-1, ""))
    if block < 0:
        found = [(name, 1.0)]
    else:
        found = [(f"{task.source.blocks[j]}{name[len(prefix) :]}", weight) for j, weight in blocks[block]]
    for one, _ in found:
        if one not in task.source.dims and one not in task.source.buffers:
            raise bad_input(
                wanted=f"a source with {one}, from which {name} of the target comes",
                got=f"no such {'parameter' if name in task.target.dims else 'buffer'} in it",
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


def _misfit(
    name: str, wanted: str, got: str, *, do: str = "name a target of the same model type and options as the source"
) -> BadInput:
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


def _second_moment(state: Tensor, maps: Sequence[DimMap]) -> Tensor:
    """Return a second moment, mapped by squares; elements that come from none get the mean of the others."""
    found, is_new = _applied(state, [one.squared() for one in maps]), torch.zeros(())
    for dim, one in enumerate(maps):
        shape = [1] * found.dim()
        shape[dim] = -1
        is_new = torch.logical_or(is_new, (one.weight == 0).all(0).view(shape))
    if not bool(is_new.any()):
        return found
    rest = found[~is_new.expand(found.shape)]
    return torch.where(is_new, rest.mean() if rest.numel() else state.mean(), found)


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
    counts = [len(side.blocks) for side in (task.source, task.target)]
    if not all(counts) and any(counts):
        raise bad_input(
            wanted="repeated blocks in both models, or in none",
            got=f"{counts[0]} in the source and {counts[1]} in the target",
            do="name a target of the same model type as the source, whose blocks are in an nn.ModuleList",
            key="--to",
        )
    return {"source_parameters": source, "target_parameters": target}


def check_blocks(task: GrowthTask, method: str) -> tuple[int, int]:
    """Return the number of blocks of source and target; raise BadInput for a source without any (see `check_sizes`)."""
    if not task.source.blocks:
        raise bad_input(
            wanted=f"a model with repeated blocks, of which {method} changes the number",
            got="none in its forward",
            do="name a model whose blocks are in an nn.ModuleList, or take lemon",
            key=KEY,
        )
    return len(task.source.blocks), len(task.target.blocks)


def _numel(dims: Sequence[Dimension]) -> int:
    count = 1
    for one in dims:
        count *= one.size
    return count


__all__ = [
    "ADDED",
    "KEY",
    "NORM_SCALE",
    "NORM_SHIFT",
    "GrowthMap",
    "MapOf",
    "Mixture",
    "Place",
    "check_blocks",
    "check_sizes",
    "grow_tensors",
    "inherited",
]
