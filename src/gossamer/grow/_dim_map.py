"""Maps from the elements of a dim of a small parameter to those of a large one (or back), and their products.

Equation: y[t] = sum_k weight[k, t] x[index[k, t]] + mean[t] * (1/S) sum_s x[s], along one dim; S its elements before.
A parameter with several dims is mapped dim by dim: the pair of a row map and a column map of the papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DimMap:
    """A linear map along one dim. `size`: elements before; index, weight (K, T); mean, free (T).

    free: elements after that no output depends on, which may be drawn at random.
    """

    size: int
    index: Tensor
    weight: Tensor
    mean: Tensor
    free: Tensor

    @staticmethod
    def of(
        size: int, index: Tensor, weight: Tensor, *, mean: Tensor | None = None, free: Tensor | None = None
    ) -> DimMap:
        """Return the map with these rows; one-dimensional `index` and `weight` are for one element each."""
        index, weight = (index[None], weight[None]) if index.dim() == 1 else (index, weight)
        after = index.shape[1]
        return DimMap(
            size=size,
            index=index,
            weight=weight.double(),
            mean=torch.zeros(after, dtype=torch.float64) if mean is None else mean.double(),
            free=torch.zeros(after, dtype=torch.bool) if free is None else free,
        )

    @staticmethod
    def identity(size: int) -> DimMap:
        """Return the map that changes nothing."""
        return DimMap.of(size, torch.arange(size), torch.ones(size))

    @property
    def is_identity(self) -> bool:
        """Return whether the map changes nothing."""
        plain = self.index.shape == (1, self.size) and not bool(self.mean.any())
        return plain and bool((self.index[0] == torch.arange(self.size)).all()) and bool((self.weight == 1).all())

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        """Return `x`, in float64, mapped along `dim`."""
        shape = [1] * x.dim()
        shape[dim] = -1
        found = sum(
            x.index_select(dim, index) * weight.view(shape)
            for index, weight in zip(self.index, self.weight, strict=True)
        )
        assert isinstance(found, Tensor)
        return found + x.mean(dim, keepdim=True) * self.mean.view(shape) if bool(self.mean.any()) else found

    def squared(self) -> DimMap:
        """Return the map with squared weights, for squares of what this one maps element to element."""
        return DimMap.of(self.size, self.index, self.weight.square(), free=self.free)


def product(maps: Sequence[DimMap]) -> DimMap:
    """Return the map of a dim that is the product of dims, the outermost first. None of the maps has a mean."""
    return reduce(_two, maps)


def _two(outer: DimMap, inner: DimMap) -> DimMap:
    index = outer.index[:, None, :, None] * inner.size + inner.index[None, :, None, :]  # (K, L, T, U)
    weight = outer.weight[:, None, :, None] * inner.weight[None, :, None, :]
    count = index.shape[0] * index.shape[1]
    free = (outer.free[:, None] | inner.free[None, :]).flatten()
    return DimMap.of(outer.size * inner.size, index.reshape(count, -1), weight.reshape(count, -1), free=free)


def in_sequence(maps: Sequence[DimMap]) -> DimMap:
    """Return the map of a dim that is a sequence of dims."""
    most = max(one.index.shape[0] for one in maps)
    index, weight, at = [], [], 0
    for one in maps:
        more = most - one.index.shape[0]
        padded = torch.cat([one.index, one.index.new_zeros(more, one.index.shape[1])])
        index.append(padded + at)
        weight.append(torch.cat([one.weight, one.weight.new_zeros(more, one.weight.shape[1])]))
        at += one.size
    free = torch.cat([one.free for one in maps])
    return DimMap.of(at, torch.cat(index, 1), torch.cat(weight, 1), free=free)
