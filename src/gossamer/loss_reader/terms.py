"""The algebra of a loss: its summands, the denominator of each, and the factors and divisors applied to it.

A summand is a mean, a sum, or of parameters alone. Between a number and its rows, a loss may have been reduced several
times (features, then rows; rows, then tasks): the denominator is that of the node that reduced the rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gossamer.loss_reader.graph_nodes import (
    PASSING,
    GraphScalar,
    below,
    constant,
    dims_of,
    is_parameter,
    kept,
    name_of,
    number,
    saved,
    signed,
    sizes_before,
)

_OWN_WEIGHTS = "a sum with weights that add up to 1, over this rank's rows alone"
_FREE_NODES = 64  # a penalty is few nodes above its parameter
_REDUCING = ("Mean", "Sum", "Nansum")


class Kind(Enum):
    """The rule by which the ranks' values of a loss term combine to that of the global batch."""

    MEAN = "mean"
    SUM = "sum"
    FREE = "free"  # the same on every rank: parameters alone
    DIVIDED = "divided"  # a sum divided by this rank's count or by a constant
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss. `count`: its denominator if it is a mean; of a divided sum, its possible denominator."""

    kind: Kind
    what: str  # the nodes, in words
    count: float = 1.0
    factor: float = 1.0  # product of factors outside of its reduction
    divisors: tuple[GraphScalar, ...] = ()  # each divisor of a divided sum
    fixed: int = 0  # 32-bit hash of class weights, which must be equal on all ranks
    nodes: tuple[Any, ...] = ()  # of its sum
    by: Any = None  # the node that is taken to have reduced the rows

    @property
    def is_part_of_a_sum(self) -> bool:
        """Return whether a sum has a factor that may be one over a count."""
        return self.kind is Kind.SUM and 0 < abs(self.factor) < 1

    @property
    def is_computed(self) -> bool:
        """Return whether the divisor is a tensor, and not a number written in the loop."""
        return any(one.is_computed for one in self.divisors)

    def seen(self) -> set[float]:
        """Return the counts that its graph shows: elements summed, elements that a mask keeps, or their weights."""
        found: set[float] = set()
        for node in self.nodes:
            found |= _counts_of(node)
        return found


@dataclass(frozen=True, slots=True)
class TermRows:
    """The row dimension of a reduced tensor, guessed from its sizes. `rows`: of this rank, 0 if unknown."""

    rows: int
    first: int = 0  # the dimension that has them in a batch

    def dim(self, sizes: Sequence[int]) -> int:
        """Return the dimension of `sizes` that has rows: the batch's own, else one of that size, else 0."""
        if self.first < len(sizes) and sizes[self.first] == self.rows:
            return self.first
        if self.rows > 1 and sizes[0] != self.rows and self.rows in sizes:
            return tuple(sizes).index(self.rows)
        return 0


def of_root(root: Tensor, given: Tensor | None, rows: TermRows) -> Iterable[Term]:
    """Return the terms of a loss, or of a tensor that backward is given gradients for."""
    if root.grad_fn is None:
        return [Term(Kind.FREE, "a parameter")]
    if root.numel() > 1 and given is not None:  # a vector-Jacobian product is a weighted sum
        top: _Step = ("Sum", tuple(root.shape), tuple(range(root.dim())), 0.0, None)
        what = "backward of a tensor with gradients"
        return [_weighted(_reduced([top], [], root.grad_fn, what, 1.0, rows), given)]
    return _TermReader(rows).terms(root.grad_fn, 1.0 if given is None else float(given))


def _weighted(term: Term, given: Tensor) -> Term:
    """Return the term of a sum whose elements are weighted by the given gradients."""
    first = float(given.flatten()[0])
    if term.kind is not Kind.SUM or not first:
        return term
    if bool((given == first).all()):
        return term if first == 1.0 else times(term, "Div", GraphScalar(1 / first, is_computed=False))
    return Term(Kind.UNKNOWN, _OWN_WEIGHTS) if _adds_up(given) else term


@dataclass(frozen=True, slots=True)
class _TermReader:
    """The reader of the graph above the reduced tensors."""

    rows: TermRows

    def terms(self, node: Any, factor: float) -> list[Term]:
        """Return the summands of a scalar."""
        name, under = name_of(node), below(node)
        if name == "AccumulateGrad":
            return [Term(Kind.FREE, "a parameter")]
        if name in PASSING:
            return self.terms(under[0], -factor if name == "Neg" else factor)
        if name in ("Add", "Sub", "Stack", "Cat"):
            return [term for one in under if one is not None for term in self.terms(one, factor)]
        if name in ("Mul", "Div"):
            return self._scaled(node, name, under, factor)
        if name in (*_REDUCING, "Dot") and (losses := self._losses(node, name, under)) is not None:
            each = factor / len(losses) if name == "Mean" else factor
            return [times(term, "Mul", GraphScalar(each, is_computed=False)) for terms in losses for term in terms]
        if name in _REDUCING:
            return [_reduced([], [], node, "a sum", factor, self.rows)]
        if name == "Dot":
            return [self._dot(node, under, factor)]
        if hasattr(node, "_saved_reduction"):
            return [_loss(node, name, factor)]
        if is_free(node, None):
            return [Term(Kind.FREE, name)]
        return [Term(Kind.UNKNOWN, f"{name}, a function of a mean or sum that is not its multiple")]

    def _losses(self, node: Any, name: str, under: list[Any]) -> list[list[Term]] | None:
        """Return the terms of each loss in a mean, sum or weighted sum of losses; None if it is over rows."""
        if name != "Dot":
            return self._elements(under[0])
        left = under[0] is not None
        weights = saved(node, "tensor" if left else "self")
        found = self._elements(under[0] if left else under[1]) if None in under[:2] else None
        return None if found is None or not isinstance(weights, Tensor) else _each_times(found, "Mul", weights)

    def _elements(self, node: Any) -> list[list[Term]] | None:
        """Return the terms of each element of a vector of losses, as torch.stack makes it; None if it is no such
        vector.
        """
        if node is None:
            return None
        if _is_scalar(node):
            return [self.terms(node, 1.0)]
        name, under = name_of(node), below(node)
        if name in ("Stack", "Cat"):
            each: list[list[list[Term]] | None] = [
                self._elements(one) if one is not None else ([[]] if name == "Stack" else None) for one in under
            ]
            if any(one is None or (name == "Stack" and len(one) != 1) for one in each):
                return None
            return [terms for one in each if one is not None for terms in one]
        if name in PASSING:
            found = self._elements(under[0])
            return _each_times(found, "Mul", -torch.ones(())) if name == "Neg" and found is not None else found
        return self._elements_times(node, name, under) if name in ("Mul", "Div") else None

    def _elements_times(self, node: Any, name: str, under: list[Any]) -> list[list[Term]] | None:
        left, right = (*under, None)[:2]
        if left is not None and right is not None:
            free = right if name == "Div" or is_free(right, None) else left
            return self._elements(left if free is right else right) if is_free(free, None) else None
        other = saved(node, "other" if left is not None else "self")
        found = self._elements(left if left is not None else right) if left is not None or name == "Mul" else None
        if found is not None and isinstance(other, (Tensor, int, float)):
            return _each_times(found, name, torch.as_tensor(other))
        return None

    def _scaled(self, node: Any, name: str, under: list[Any], factor: float) -> list[Term]:
        """Return the terms times, or divided by, a number or a function of parameters alone."""
        left, right = (*under, None)[:2]
        if left is not None and right is not None:
            return _product(name, self.terms(left, factor), self.terms(right, 1.0))
        other = constant(node, "other" if left is not None else "self")
        terms = self.terms(left if left is not None else right, factor)
        if other is not None and other.value == 0.0 and name == "Mul":
            return []  # a term with weight 0 has no gradient
        if other is None or (other.value == 0.0 and not other.is_computed) or (name == "Div" and left is None):
            return [
                Term(Kind.UNKNOWN, f"{name} with something that is no number") if t.kind is not Kind.FREE else t
                for t in terms
            ]
        return [times(term, name, other) for term in terms]

    def _dot(self, node: Any, under: list[Any], factor: float) -> Term:
        """Return the term of a sum of losses times their weights."""
        left = under[0] is not None
        weights = saved(node, "tensor" if left else "self")
        if None not in under[:2] or not isinstance(weights, Tensor):
            return Term(Kind.UNKNOWN, "Dot of two tensors that both depend on the batch")
        sizes = tuple(weights.shape)
        top: list[_Step] = [("Sum", sizes, (0,), 0.0, None), ("Mul", sizes, (), 0.0, weights)]
        return _reduced(top, [node], under[0] if left else under[1], "a sum", factor, self.rows)


def _each_times(losses: list[list[Term]], name: str, weights: Tensor) -> list[list[Term]] | None:
    numbers = weights.flatten().tolist()
    if len(numbers) not in (1, len(losses)) or (name == "Div" and 0.0 in numbers):
        return None
    numbers = numbers * len(losses) if len(numbers) == 1 else numbers
    one = number(weights)
    is_computed = one is None or one.is_computed
    return [
        [times(term, name, GraphScalar(each, is_computed)) for term in terms] if each else []
        for each, terms in zip(numbers, losses, strict=True)
    ]


def _is_scalar(node: Any) -> bool:
    """Return whether the node makes tensors without dimensions: a loss, and not a row."""
    return all(not tuple(meta.shape) for meta in node._input_metadata)


def _product(name: str, first: list[Term], second: list[Term]) -> list[Term]:
    if all(t.kind is Kind.FREE for t in second):
        return first
    if name == "Mul" and all(t.kind is Kind.FREE for t in first):
        return second
    return [Term(Kind.UNKNOWN, f"{name} of two terms that both depend on the batch")]


def times(term: Term, name: str, other: GraphScalar) -> Term:
    """Return the term times, or divided by, a scalar. A divided sum may be a mean; other terms keep their kind."""
    is_sum, value = term.kind in (Kind.SUM, Kind.DIVIDED), other.value
    if is_sum and name == "Mul" and other.is_computed and abs(value) < 1:  # times the inverse of a tensor
        name, value = "Div", 1 / value
    if is_sum and name == "Div":
        what, divisors = f"{term.what} / {value:g}", (*term.divisors, GraphScalar(abs(value), other.is_computed))
        return replace(term, kind=Kind.DIVIDED, what=what, count=term.count * abs(value), divisors=divisors)
    if not value:
        return Term(Kind.UNKNOWN, f"{term.what} {'times' if name == 'Mul' else '/'} 0")
    factor = term.factor * value if name == "Mul" else term.factor / value
    return replace(term, factor=factor)


# Reductions.

_Step: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], float, Any]  # name, sizes, dims, count, with what


def _reduced(top: list[_Step], nodes: list[Any], node: Any, what: str, factor: float, rows: TermRows) -> Term:
    """Return the term of one or several successive reductions, with the factors between them."""
    steps, first = list(top), node
    while node is not None and (found := _step(node)) is not None:
        step, under = found
        steps.append(step)
        nodes.append(node)
        node = under
    reductions = [(at, step) for at, step in enumerate(steps) if step[0] in _REDUCING]
    if node is None or is_free(first, top[0][1] if top else None):
        return Term(Kind.FREE, "parameters alone")
    of_rows = [at for at, (_, sized, dims, _, _) in reductions if not sized or rows.dim(sized) in dims]
    at = of_rows[-1] if of_rows else reductions[0][0]
    name, sized, dims, _, _ = steps[at]
    by = nodes[at - len(steps)] if at >= len(top) else (nodes[0] if len(top) > 1 else None)
    if name == "Mean":
        count = float(prod(sized[dim] for dim in dims))
        term = Term(Kind.MEAN, f"a mean over {count:g}", count, factor, by=by)
    else:
        term = Term(Kind.SUM, what, 1.0, factor, nodes=(*nodes, node), by=by)
    return _rescaled(term, steps, at, rows)


def _rescaled(term: Term, steps: Sequence[_Step], at: int, rows: TermRows) -> Term:
    """Return the term with the factors between its reductions applied."""
    for place, (name, sizes, _, _, other) in enumerate(steps):
        if name not in ("Mul", "Div") or term.kind is Kind.UNKNOWN:
            continue
        if (one := number(other)) is not None:
            term = times(term, name, one) if one.value or one.is_computed else term
        elif isinstance(other, Tensor):
            term = _of_columns(term, name, other) if place < at else _of_rows(term, other, sizes, rows)
    return term


def _of_columns(term: Term, name: str, weights: Tensor) -> Term:
    """Return the term after a weight for each of several losses, which were reduced over rows before."""
    flat = weights.detach().flatten()
    if term.kind is Kind.MEAN:
        return replace(term, fixed=zlib.crc32(_bits(flat).to_bytes(4, "big"), term.fixed))
    if bool((flat == flat[0]).all()):
        return times(term, name, GraphScalar(float(flat[0]), is_computed=True))
    return Term(
        Kind.UNKNOWN, f"{term.what}, of which each column was {'multiplied' if name == 'Mul' else 'divided'} by its own"
    )


def _of_rows(term: Term, weights: Tensor, sizes: tuple[int, ...], rows: TermRows) -> Term:
    """Return the term after a weight for each element that is reduced later."""
    back = len(sizes) - rows.dim(sizes) if sizes else 1
    has_rows = back <= weights.dim() and (weights.shape[-back] > 1 or rows.rows == 1)
    return Term(Kind.UNKNOWN, _OWN_WEIGHTS) if has_rows and weights.numel() > 1 and _adds_up(weights) else term


def _step(node: Any) -> tuple[_Step, Any] | None:
    """Return a reduction, factor or view and its input node; None if the node is none of them."""
    name, under = name_of(node), below(node)
    if name in _REDUCING:
        sizes = sizes_before(node)
        return (name, sizes, dims_of(node, sizes), 0.0, None), under[0]
    if name in PASSING:
        return (name, (), (), 0.0, None), under[0]
    if name in ("Mul", "Div") and None in (*under, None)[:2]:
        left = under[0] is not None
        if left or name == "Mul":
            sizes = tuple(node._input_metadata[0].shape)
            other = saved(node, "other" if left else "self")
            return (name, sizes, (), 0.0, other), under[0] if left else under[1]
    return None


def _loss(node: Any, name: str, factor: float) -> Term:
    """Return the term of a torch loss that reduces itself."""
    if node._saved_reduction == 2:
        fixed = _bits(saved(node, "weight")) if name.startswith("NllLoss") else 0
        return Term(Kind.SUM, f"{name} (reduction='sum')", 1.0, factor, fixed=fixed, nodes=(node,))
    if name.startswith("NllLoss"):
        total = float(node._saved_total_weight)
        return Term(Kind.MEAN, f"{name} over {total:g}", total, factor, fixed=_bits(saved(node, "weight")))
    count = float(node._saved_self.numel()) if name != "MultiMarginLoss" else float(node._saved_self.shape[0])
    per_class = saved(node, "pos_weight")
    is_fixed = isinstance(per_class, Tensor) and per_class.dim() < node._saved_self.dim()
    return Term(Kind.MEAN, f"{name} over {count:g}", count, factor, fixed=_bits(per_class) if is_fixed else 0)


def _bits(weights: Any) -> int:
    """Return a 32-bit hash of class weights, which differ between ranks if made from a rank's own rows."""
    return zlib.crc32(repr(weights.detach().tolist()).encode()) if isinstance(weights, Tensor) else 0


def _counts_of(node: Any) -> set[float]:
    name = name_of(node)
    if name in _REDUCING:
        sizes = sizes_before(node)
        found = {float(prod(sizes)), *(float(size) for size in sizes if size > 1)}
        if name == "Nansum" and (summed := kept(node, "self")) is not None:
            found.add(float((~summed.isnan()).sum()))
        return found
    if name in ("Mul", "Div"):
        other = kept(node, "other" if below(node)[0] is not None else "self")
        return set() if other is None or not other.dim() else {float(other.sum()), float(torch.count_nonzero(other))}
    if name == "Dot":
        other = kept(node, "tensor" if below(node)[0] is not None else "self")
        return set() if other is None else {float(other.sum()), float(torch.count_nonzero(other))}
    if name in ("Where", "MaskedFill"):
        through = kept(node, "condition" if name == "Where" else "mask")
        if through is None:
            return set()
        count, whole = float(through.sum()), float(prod(node._input_metadata[0].shape))
        many = whole / max(1, through.numel())
        return {count, through.numel() - count, count * many, (through.numel() - count) * many}
    if name.startswith("NllLoss"):
        target = kept(node, "target")
        found = set() if target is None else {float((target != signed(node._saved_ignore_index)).sum())}
        return found | {float(node._saved_total_weight)}
    if hasattr(node, "_saved_reduction"):
        one = kept(node, "self")
        return set() if one is None else {float(one.numel()), *(float(size) for size in one.shape if size > 1)}
    return set()


def _adds_up(weights: Tensor) -> bool:
    """Return whether positive weights sum to 1; with both signs a sum of 1 may be chance, in one of many steps."""
    if not weights.is_floating_point() or bool((weights == 1).any()) or bool((weights < 0).any()):
        return False
    return abs(float(weights.sum()) - 1.0) < 1e-3


def is_free(node: Any, sizes: tuple[int, ...] | None) -> bool:
    """Return whether a node depends on parameters alone, each of the reduced sizes, so that no rows entered."""
    todo: list[tuple[Any, tuple[int, ...] | None]] = [(node, sizes)]
    seen = 0
    while todo:
        one, sizes = todo.pop()
        if one is None:
            continue
        seen += 1
        name = name_of(one)
        if seen > _FREE_NODES or name not in (*_BY_ELEMENT, *PASSING, "Mm", "AccumulateGrad"):
            return False
        if name in ("Select", "Unbind", "Slice") and not is_parameter(one.next_functions[0][0]):
            return False
        if name in ("Mul", "Div") and any(
            (given := constant(one, side)) is not None and given.is_computed
            for side, under in zip(("self", "other"), one.next_functions[::-1], strict=False)
            if under[0] is not None
        ):
            return False
        if name == "AccumulateGrad":
            if sizes is not None and tuple(one.variable.shape) != sizes:
                return False
            continue
        if name in ("Norm", "LinalgVectorNorm"):
            sizes = tuple(one._saved_self.shape)
        elif name in ("Sum", "Mean"):
            sizes = tuple(one._saved_self_sym_sizes)
        elif name == "Mm":
            factors = [saved(one, f"{side}_sym_sizes") for side in ("self", "mat2")]
            if None in below(one) or None in factors:
                return False
            todo += zip(below(one), map(tuple, factors), strict=True)
            continue
        elif name in ("T", "Transpose", "Permute") and sizes is not None and len(sizes) == 2:
            sizes = sizes[::-1]
        todo += [(under, sizes) for under in below(one)]
    return seen > 0


# Operations of penalties on parameters. Any other may bring rows in: a layer, or a function of the user's.
_BY_ELEMENT = {
    *("Add", "Sub", "Mul", "Div", "Pow", "Exp", "Log", "Log1P", "Expm1", "Abs", "Sqrt", "Rsqrt", "Reciprocal", "Sign"),
    *(
        "Sigmoid",
        "LogSigmoid",
        "Tanh",
        "Relu",
        "Softplus",
        "Clamp",
        "ClampMin",
        "ClampMax",
        "Sin",
        "Cos",
        "Stack",
        "Cat",
    ),
    *(
        "Sum",
        "Mean",
        "Norm",
        "LinalgVectorNorm",
        "Max",
        "Min",
        "Maximum",
        "Minimum",
        "Where",
        "Select",
        "Unbind",
        "Slice",
    ),
}
