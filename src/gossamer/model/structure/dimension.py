"""Dimensions of a model: dims of tensors that the forward makes one and the same, found by union and refinement.

A dim of a tensor is one `Dimension`. Operators unify dimensions (a matmul: the two that it contracts), and take them
apart: a view makes a dimension a product (heads x head size), a slice or a concatenation makes it a sequence of parts
(query, key and value of a fused projection). Both forms are refined where two dimensions of different form meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

LEAF, PRODUCT, PARTS = "leaf", "product", "parts"


class Clash(Exception):
    """Two dimensions that cannot be one: of different sizes, or of forms that cannot be refined."""


class Dimension:
    """A node of the union-find: `size` elements; with a form, those of `inside`."""

    __slots__ = ("_form", "_inside", "_up", "size")

    def __init__(self, size: int, form: str = LEAF, inside: Sequence[Dimension] = ()) -> None:
        self.size = size
        self._form, self._inside = form, list(inside)
        self._up: Dimension | None = None

    @property
    def root(self) -> Dimension:
        """The node that stands for all that were unified with this one."""
        at = self
        while at._up is not None:
            at = at._up
        return at

    @property
    def form(self) -> str:
        return self.root._form

    def factors(self) -> list[Dimension]:
        """Return the roots whose product this is, the outermost first; none for one element."""
        root = self.root
        if root._form == PRODUCT:
            return [one for inner in root._inside for one in inner.factors()]
        return [] if root.size == 1 else [root]

    def parts(self) -> list[Dimension]:
        """Return the roots that this is the sequence of."""
        root = self.root
        return [one for inner in root._inside for one in inner.parts()] if root._form == PARTS else [root]

    def leaves(self) -> Iterator[Dimension]:
        """Yield the roots without a form in it."""
        root = self.root
        if root._form == LEAF:
            yield root
        for inner in root._inside:
            yield from inner.leaves()

    def take_apart(self, form: str, inside: Sequence[Dimension]) -> None:
        """Give a form to a dimension that has none. Raises Clash."""
        root = self.root
        if root._form != LEAF:
            raise Clash(f"a dimension of {root.size} is both a {root._form} and a {form}")
        root._form, root._inside = form, list(inside)


def product_of(factors: Sequence[Dimension]) -> Dimension:
    """Return the product of dimensions, the outermost first."""
    many = [one for factor in factors for one in factor.factors()]
    return many[0] if len(many) == 1 else Dimension(math.prod(one.size for one in many), *_formed(PRODUCT, many))


def parts_of(parts: Sequence[Dimension]) -> Dimension:
    """Return the sequence of dimensions."""
    many = [one for part in parts for one in part.parts()]
    return many[0] if len(many) == 1 else Dimension(sum(one.size for one in many), *_formed(PARTS, many))


def _formed(form: str, inside: list[Dimension]) -> tuple[str, list[Dimension]]:
    return (form, inside) if inside else (LEAF, [])


def unify(one: Dimension, other: Dimension) -> None:
    """Make two dimensions one. Raises Clash."""
    a, b = one.root, other.root
    if a is b:
        return
    if a.size != b.size:
        raise Clash(f"dimensions of {a.size} and {b.size}")
    if a.size > 1 and LEAF not in (a.form, b.form):
        if a.form != b.form:
            raise Clash(f"a dimension of {a.size} is both a {a.form} and a {b.form}")
        (_unify_products if a.form == PRODUCT else _unify_parts)(a, b)
        a, b = a.root, b.root
        if a is b:
            return
    low, high = (a, b) if a.form == LEAF else (b, a)
    low._up = high


def _unify_products(a: Dimension, b: Dimension) -> None:
    left, right = a.factors(), b.factors()
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x.size == y.size:
            unify(x, y)
            continue
        large, small, rest = (x, y, left) if x.size > y.size else (y, x, right)
        if large.size % small.size:
            raise Clash(f"products of {x.size} and of {y.size}")
        after = Dimension(large.size // small.size)
        large.take_apart(PRODUCT, [small, after])
        rest.insert(0, after)


def _unify_parts(a: Dimension, b: Dimension) -> None:
    left, right = a.parts(), b.parts()
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x.size == y.size:
            unify(x, y)
            continue
        large, small, rest = (x, y, left) if x.size > y.size else (y, x, right)
        after = Dimension(large.size - small.size)
        large.take_apart(PARTS, [small, after])
        rest.insert(0, after)


def viewed(dims: Sequence[Dimension], sizes: Sequence[int]) -> list[Dimension]:
    """Return the dims of a view with `sizes` of a tensor with `dims`. Raises Clash."""
    ahead = [one for dim in dims for one in dim.factors()]
    found = []
    for size in sizes:
        taken, left = list[Dimension](), size
        while left > 1:
            if not ahead:
                raise Clash(f"a view of {size}")
            first = ahead.pop(0)
            if left % first.size == 0:
                taken.append(first)
                left //= first.size
            elif first.size % left == 0:
                outer, inner = Dimension(left), Dimension(first.size // left)
                first.take_apart(PRODUCT, [outer, inner])
                taken.append(outer)
                ahead.insert(0, inner)
                left = 1
            else:
                raise Clash(f"a view of {size} across {first.size}")
        found.append(product_of(taken) if taken else Dimension(size))
    return found


def sliced(dim: Dimension, start: int, end: int) -> Dimension:
    """Return the dimension of the elements `start` to `end` of another one. Raises Clash."""
    root = dim.root
    if (start, end) == (0, root.size):
        return root
    if root.form == PRODUCT:
        first, *rest = root.factors()
        inner = root.size // first.size
        if start % inner or end % inner:
            raise Clash(f"a slice across a product of {first.size} and {inner}")
        return product_of([sliced(first, start // inner, end // inner), *rest])
    if root.form == LEAF:
        borders = [0, *(at for at in (start, end) if 0 < at < root.size), root.size]
        root.take_apart(PARTS, [Dimension(b - a) for a, b in pairwise(borders) if b > a])
    found, at = list[Dimension](), 0
    for part in root.parts():
        low, high = max(start, at), min(end, at + part.size)
        if low < high:
            found.append(sliced(part, low - at, high - at))
        at += part.size
    return parts_of(found) if found else Dimension(0)
