"""The maps that coalesce, de_coalesce and interpolate share: groups of units, large to small and back.

Equations, for a dim of s elements in the small model and b = g s in the large one (unit i is grouped with i + s, ...):
    small <- large    writers: mean of the group ; readers: sum of the group
    large <- small    writers: copies ; readers: 1/g of it each
    tied head         the norm in front of it: times g (small <- large), by g (large <- small)
    depth             groups of adjacent blocks: their mean ; copies
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gossamer.grow import Grown, GrowthTask
from gossamer.grow._dim_map import DimMap
from gossamer.grow._grown import NORM_SCALE, NORM_SHIFT, GrowthMap, Mixture, Place, check_sizes, grow_tensors
from gossamer.grow._stream import Stream, indivisible
from gossamer.model.structure.model import STREAM


def grouped(task: GrowthTask, *, method: str, shrinks: bool) -> Grown:
    """Return the target of the source's groups, or the source of the target's. Raises BadInput."""
    said = check_sizes(task, shrinks=shrinks)
    rule = _Rule(stream=Stream.of(task), method=method, shrinks=shrinks)
    blocks = _blocks(task, method, shrinks=shrinks)
    found = grow_tensors(task, blocks, rule.map_of)
    said |= {"width": [rule.stream.before, rule.stream.after], "blocks": [len(task.source.blocks), len(blocks)]}
    is_lossless = not shrinks and len(blocks) == len(task.source.blocks)  # repeated blocks compute something else
    moments = found.moments if is_lossless else {}
    return Grown(tensors=found.tensors, moments=moments, eps=found.eps, said=said, is_lossless=is_lossless)


def _blocks(task: GrowthTask, method: str, *, shrinks: bool) -> list[Mixture]:
    before, after = len(task.source.blocks), len(task.target.blocks)
    small, large = (after, before) if shrinks else (before, after)
    if small < 1:  # so has the other one
        return []
    if large % small:
        raise indivisible(method, "blocks", "the repeated blocks", small, large)
    size = large // small
    if shrinks:
        return [tuple((i * size + k, 1 / size) for k in range(size)) for i in range(after)]
    return [((i // size, 1.0),) for i in range(after)]


def _counted(role: str) -> str:
    return "elements of the residual stream" if role == STREAM else role


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    stream: Stream
    method: str
    shrinks: bool

    def map_of(self, place: Place) -> GrowthMap:
        """Return the maps of one dimension."""
        small, large = sorted((place.before, place.after))
        if large % small or (small != large and (place.before < place.after) == self.shrinks):
            raise indivisible(self.method, _counted(place.role), place.name, small, large)
        size = large // small
        tied = size if place.role == STREAM and place.name in self.stream.tied else 1
        reads = place.is_read
        if reads and place.role == STREAM and place.name in self.stream.tied_reads:
            tied = size  # the norm takes the factor
        if self.shrinks:
            index = torch.arange(large).view(size, small)
            each = (1.0 if reads else 1 / size) / (tied if reads else 1 / tied)
            return GrowthMap(values=DimMap.of(large, index, torch.full((size, small), each, dtype=torch.float64)))
        index = torch.arange(large) % small
        each = (1 / size if reads else 1.0) * (tied if reads else 1 / tied)
        share = 1 / size
        is_norm = {NORM_SCALE, NORM_SHIFT} & place.how
        factor = share / each if not is_norm or tied == 1 else 1.0
        gradients = DimMap.of(small, index, torch.full((large,), factor, dtype=torch.float64))
        values = DimMap.of(small, index, torch.full((large,), each, dtype=torch.float64))
        return GrowthMap(values=values, gradients=gradients)
