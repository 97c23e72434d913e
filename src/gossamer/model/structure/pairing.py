"""Pair the dims of one model with those of another of the same code: which dimension became which, in what size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gossamer.model.structure.dimension import Clash, Dimension

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding(Generic[T]):
    """How a value for each pair of leaves is combined to one for a dim: of products, and of sequences."""

    product: Callable[[Sequence[T]], T]
    parts: Callable[[Sequence[T]], T]


def paired(source: Dimension, target: Dimension, of: Callable[[Dimension, Dimension], T], fold: Folding[T]) -> T:
    """Return `of(leaf, leaf)` of each pair of leaves, combined as they are in the dim. Raises Clash.

    A factor that the source lacks (one key-value head) is paired with a dimension of one element.
    """
    left, right = source.parts(), target.parts()
    if len(left) != len(right):
        raise Clash(f"a dim in {len(left)} parts and one in {len(right)}")
    found = [_factors(a, b, of, fold) for a, b in zip(left, right, strict=True)]
    return found[0] if len(found) == 1 else fold.parts(found)


def _factors(a: Dimension, b: Dimension, of: Callable[[Dimension, Dimension], T], fold: Folding[T]) -> T:
    left, right = a.factors() or [a.root], b.factors() or [b.root]
    if len(left) < len(right):
        left = [*(Dimension(1) for _ in range(len(right) - len(left))), *left]
    if len(left) != len(right):
        raise Clash(f"a dim of {len(left)} factors and one of {len(right)}")
    found = [
        of(x, y) if len(x.parts()) == len(y.parts()) == 1 else paired(x, y, of, fold)
        for x, y in zip(left, right, strict=True)
    ]
    return found[0] if len(found) == 1 else fold.product(found)
