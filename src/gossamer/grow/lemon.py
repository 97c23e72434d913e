"""LEMON: lossless expansion of width, depth, heads and hidden units of a pre-norm transformer, to any larger sizes.

Paper: Wang, Y. et al., "LEMON: Lossless model expansion", ICLR 2024, arXiv:2310.07999.
Equations, for a residual stream of D -> E elements, n = floor(E / D), r = E - n D, eta = sqrt(n D / E):
    writers of the stream    rows n times, then r rows mean (LayerNorm) or 0 (RMSNorm)
    norms over the stream    gamma <- eta gamma ;  beta <- beta, 0 in the r ;  eps <- eta^2 eps
    readers of the stream    columns a_i W for copy i, sum_i a_i = 1 ; the r columns are free
    heads, hidden units      unit j is unit j mod count ; who reads them splits its columns unequally, sum 1
    tied head                the norm in front of it: gamma, beta / n
    new blocks (after their source)   type 1: what writes to the stream is 0 ;  type 2: copies of units with weights
                             that add up to 0, so that the block gives 0 with weights that are not
    moments                  the gradient of element k is s_k / c_k times the source's: c_k the weight in the map, s_k
                             the share of what reads it ;  m by that factor, v by its square
Symbols: a_i unequal shares, of `spread`: (1 + spread (2 i - (n - 1)) / (n - 1)) / n.
Good when: the small model is trained, and the target is up to a few times as large. Give it its own warm-up.
Not for: post-norm models where E is no multiple of D; another head size; dropout: equal in evaluation mode alone.
Unlike the paper: gamma of the r elements is the mean and not 0, as these then have a gradient (their norm is 0 before
it is scaled); shares are fixed and not random. The moments of writers of the stream take equal shares 1/n: the gradient
through a norm is not that of any one copy where the shares are unequal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gossamer.grow import Grown, Growth, GrowthTask
from gossamer.grow._dim_map import DimMap
from gossamer.grow._grown import (
    ADDED,
    NORM_SCALE,
    NORM_SHIFT,
    GrowthMap,
    Mixture,
    Place,
    check_sizes,
    grow_tensors,
)
from gossamer.grow._stream import Stream
from gossamer.model.structure.model import READS, STREAM, WRITES, ModelStructure
from gossamer.spec.errors import BadInput, bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemon(Growth):
    """Lossless expansion. depth: type of new blocks, 1 or 2; spread: how unequal copies share, 0 (equal) to below 1."""

    is_lossless: ClassVar[bool] = True

    depth: Literal[1, 2] = 1
    spread: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.spread < 1:
            raise BadInput(f"spread: wanted 0 or more and below 1, got {self.spread}: set 0.5", key="spread")

    def grow(self, task: GrowthTask) -> Grown:
        said = check_sizes(task, shrinks=False)
        stream = Stream.of(task)
        blocks, new = _blocks(task)
        rule = _Rule(task=task, stream=stream, spread=self.spread, depth=self.depth, new=new)
        rule.check()
        found = grow_tensors(task, blocks, rule.map_of, new_blocks=new)
        said |= {"width": [stream.before, stream.after], "blocks": [len(task.source.blocks), len(blocks)]}
        return Grown(tensors=found.tensors, moments=found.moments, eps=rule.eps(found.eps), said=said)


def _blocks(task: GrowthTask) -> tuple[list[Mixture], frozenset[int]]:
    """Return where each block of the target comes from, and which are new: those after the first copy of a block."""
    before, after = len(task.source.blocks), len(task.target.blocks)
    if after < before:
        raise bad_input(
            wanted=f"at least as many blocks as the source, {before}",
            got=f"{after}",
            do="name a deeper target, or shrink with coalesce",
            key="--to",
        )
    origin = [i * before // after for i in range(after)]
    new = frozenset(i for i in range(1, after) if origin[i] == origin[i - 1])
    return [((j, 1.0),) for j in origin], new


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    task: GrowthTask
    stream: Stream
    spread: float
    depth: int
    new: frozenset[int]

    @property
    def copies(self) -> int:
        return self.stream.after // self.stream.before

    @property
    def more(self) -> int:
        return self.stream.after % self.stream.before

    @property
    def eta(self) -> float:
        return math.sqrt(self.copies * self.stream.before / self.stream.after)

    def check(self) -> None:
        """Raise BadInput for norms that cannot be scaled, and for what type 2 cannot serve."""
        if self.stream.after < self.stream.before:
            sizes = f"{self.stream.after}, the source has {self.stream.before}"
            raise bad_input(
                wanted="a residual stream that is no narrower than the source's", got=sizes, do="widen it", key="--to"
            )
        if len(self.stream.kinds) > 1 and self.more:
            raise bad_input(
                wanted="norms of one kind over the residual stream, or a width that is a multiple of the source's",
                got=f"{' and '.join(sorted(self.stream.kinds))} norms, {self._sizes()}",
                do=self._legal(),
                key="--to",
            )
        for norm in self.task.target.norms:
            if norm.weight or self.task.target.role(next(norm.dim.leaves())) != STREAM:
                continue
            if self.more:
                raise bad_input(
                    wanted="a weight in every norm over the residual stream, which takes the factor of the width",
                    got=f"{norm.name}, {self._sizes()}",
                    do=self._legal(),
                    key="--to",
                )
        if self.depth == 2 and self.new and not any(self._duplicates(name) for name in self._new_writers()):
            raise bad_input(
                wanted="units that are there several times in new blocks, whose weights add up to 0 (depth 2)",
                got="as many heads and hidden units in the target as in the source",
                do="set depth: 1, or widen the hidden units too",
                key="--by",
            )

    def _sizes(self) -> str:
        return f"widths {self.stream.before} and {self.stream.after}"

    def _legal(self) -> str:
        low = self.copies * self.stream.before
        return f"set the width to {low} or {low + self.stream.before}"

    def eps(self, inherited: Mapping[str, float]) -> Mapping[str, float]:
        """Return the epsilon of each norm by its weight: those over the stream are scaled."""
        target, factor = self.task.target, self.eta**2
        over = {one.weight for one in target.norms if target.role(next(one.dim.leaves())) == STREAM}
        return {name: value * factor if name in over else value for name, value in inherited.items()}

    def _source_of(self, name: str) -> str:
        for i, prefix in enumerate(self.task.target.blocks):
            if name.startswith(f"{prefix}."):
                j = i * len(self.task.source.blocks) // len(self.task.target.blocks)
                return f"{self.task.source.blocks[j]}{name[len(prefix) :]}"
        return name

    def map_of(self, place: Place) -> GrowthMap:
        """Return the maps of one dimension."""
        if place.role == STREAM:
            return self._zeros(place) if self._is_zero(place) else self._of_stream(place)
        return self._of_units(place)

    def _is_zero(self, place: Place) -> bool:
        """Return whether a parameter of a new block is set to 0, so that the block adds nothing."""
        if place.block not in self.new or not ({WRITES, ADDED} & place.how):
            return False
        return ADDED in place.how or self.depth == 1 or not self._duplicates(place.name)

    def _new_writers(self) -> list[str]:
        target = self.task.target
        return [
            name
            for name, dims in target.dims.items()
            if any(name.startswith(f"{target.blocks[i]}.") for i in self.new)
            for dim in range(len(dims))
            if WRITES in target.how(name, dim) and _is_stream(target, name, dim)
        ]

    def _duplicates(self, name: str) -> bool:
        """Return whether units that a parameter reads are there several times in the target."""
        target, source = self.task.target, self.task.source
        for dim, (after, before) in enumerate(zip(target.dims[name], source.dims[self._source_of(name)], strict=True)):
            if READS in target.how(name, dim) and not _is_stream(target, name, dim) and after.size > before.size:
                return True
        return False

    def _zeros(self, place: Place) -> GrowthMap:
        index = torch.zeros(place.after, dtype=torch.long)
        return GrowthMap(values=DimMap.of(place.before, index, torch.zeros(place.after)))

    def _of_stream(self, place: Place) -> GrowthMap:
        n, r, size = self.copies, self.more, place.before
        index = torch.arange(place.after) % size
        is_copy = (torch.arange(place.after) < n * size).double()
        is_more = 1 - is_copy
        share = torch.cat([self._shares(n).repeat_interleave(size), torch.zeros(r, dtype=torch.float64)])
        equal = is_copy / n
        tied = place.name in self.stream.tied
        factor = 1 / n if tied else 1.0
        mean = None
        if NORM_SCALE in place.how:
            weight, grads = self.eta * factor * is_copy, (equal if tied else share) / (self.eta * factor)
            mean = self.eta * factor * is_more
        elif NORM_SHIFT in place.how:
            weight, grads = factor * is_copy, (equal if tied else share) / factor
        elif place.is_read:
            total = n if place.name in self.stream.tied_reads else 1
            weight, grads = share * total, is_copy / total
            free = is_more.bool() if None not in self.task.target.reads.get(place.name, {None}) else None
            values = DimMap.of(size, index, weight, free=free)
            return GrowthMap(values=values, gradients=DimMap.of(size, index, grads))
        else:  # writes to the stream, or is added to it
            weight, grads = is_copy, equal
            mean = is_more if "layer" in self.stream.kinds else None
        return GrowthMap(
            values=DimMap.of(size, index, weight, mean=mean if r else None), gradients=DimMap.of(size, index, grads)
        )

    def _of_units(self, place: Place) -> GrowthMap:
        size, after = place.before, place.after
        if after < size:
            raise bad_input(
                wanted=f"at least as many {place.role} as the source, {size}",
                got=f"{after} ({place.name})",
                do="name a target that has no fewer of anything",
                key="--to",
            )
        index = torch.arange(after) % size
        number, counts = torch.arange(after) // size, torch.bincount(index, minlength=size)[index]
        share = _shared([self._shares(int(c)) for c in counts], number)
        if not place.is_read:
            ones = torch.ones(after)
            return GrowthMap(values=DimMap.of(size, index, ones), gradients=DimMap.of(size, index, share))
        grads = DimMap.of(size, index, torch.ones(after))
        if self.depth == 2 and place.block in self.new and after > size and self._writes_stream(place.name):
            share = _shared([_canceling(int(c)) for c in counts], number)
        return GrowthMap(values=DimMap.of(size, index, share), gradients=grads)

    def _writes_stream(self, name: str) -> bool:
        target = self.task.target
        return any(
            WRITES in target.how(name, dim) and _is_stream(target, name, dim) for dim in range(len(target.dims[name]))
        )

    def _shares(self, count: int) -> Tensor:
        """Return unequal shares of `count` copies, which add up to 1."""
        if count < 2:
            return torch.ones(count, dtype=torch.float64)
        place = 2 * torch.arange(count, dtype=torch.float64) - (count - 1)
        return (1 + self.spread * place / (count - 1)) / count


def _shared(of: list[Tensor], number: Tensor) -> Tensor:
    return torch.stack([shares[int(i)] for shares, i in zip(of, number, strict=True)])


def _canceling(count: int) -> Tensor:
    """Return weights of `count` copies that add up to 0; 0 where there is one."""
    if count == 1:
        return torch.zeros(1, dtype=torch.float64)
    return torch.tensor([1.0, *[-1 / (count - 1)] * (count - 1)], dtype=torch.float64)


def _is_stream(structure: ModelStructure, name: str, dim: int) -> bool:
    return any(structure.role(leaf) == STREAM for leaf in structure.dims[name][dim].leaves())
