"""Terms of one or several successive reductions: the denominator is that of the node that reduced the rows.

Between a number and its rows, a loss may have been reduced several times: features, then rows; rows, then tasks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

from torch import Tensor

from gossamer.loss_reader.graph_nodes import (
    PASSING,
    REDUCING,
    GraphScalar,
    below,
    dims_of,
    number,
    op_name,
    saved,
    sizes_before,
)
from gossamer.loss_reader.parameter_terms import depends_on_parameters_only
from gossamer.loss_reader.terms import Kind, Term, TermRows, times

_OWN_WEIGHTS = "a sum with weights that add up to 1, over this rank's rows alone"
_Step: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], float, Any]  # name, sizes, dims, count, with what


def read_sum(node: Any, factor: float, rows: TermRows) -> Term:
    """Return the term of a reduction, or of several in succession."""
    return _reduced([], [], node, "a sum", factor, rows)


def read_dot(node: Any, under: list[Any], factor: float, rows: TermRows) -> Term:
    """Return the term of a sum of losses times their weights."""
    left = under[0] is not None
    weights = saved(node, "tensor" if left else "self")
    if None not in under[:2] or not isinstance(weights, Tensor):
        return Term(Kind.UNKNOWN, "Dot of two tensors that both depend on the batch")
    sizes = tuple(weights.shape)
    top: list[_Step] = [("Sum", sizes, (0,), 0.0, None), ("Mul", sizes, (), 0.0, weights)]
    return _reduced(top, [node], under[0] if left else under[1], "a sum", factor, rows)


def read_weighted(root: Tensor, given: Tensor, rows: TermRows) -> Term:
    """Return the term of a tensor that backward is given gradients for: a vector-Jacobian product is a weighted sum."""
    top: _Step = ("Sum", tuple(root.shape), tuple(range(root.dim())), 0.0, None)
    what = "backward of a tensor with gradients"
    return _weighted(_reduced([top], [], root.grad_fn, what, 1.0, rows), given)


def read_torch_loss(node: Any, name: str, factor: float) -> Term:
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


def _weighted(term: Term, given: Tensor) -> Term:
    """Return the term of a sum whose elements are weighted by the given gradients."""
    first = float(given.flatten()[0])
    if term.kind is not Kind.SUM or not first:
        return term
    if bool((given == first).all()):
        return term if first == 1.0 else times(term, "Div", GraphScalar(1 / first, is_computed=False))
    return Term(Kind.UNKNOWN, _OWN_WEIGHTS) if _adds_up(given) else term


def _reduced(top: list[_Step], nodes: list[Any], node: Any, what: str, factor: float, rows: TermRows) -> Term:
    """Return the term of one or several successive reductions, with the factors between them."""
    steps, first = list(top), node
    while node is not None and (found := _step(node)) is not None:
        step, under = found
        steps.append(step)
        nodes.append(node)
        node = under
    reductions = [(at, step) for at, step in enumerate(steps) if step[0] in REDUCING]
    if node is None or depends_on_parameters_only(first, top[0][1] if top else None):
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
    name, under = op_name(node), below(node)
    if name in REDUCING:
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


def _adds_up(weights: Tensor) -> bool:
    """Return whether positive weights sum to 1; with both signs a sum of 1 may be chance, in one of many steps."""
    if not weights.is_floating_point() or bool((weights == 1).any()) or bool((weights < 0).any()):
        return False
    return abs(float(weights.sum()) - 1.0) < 1e-3


def _bits(weights: Any) -> int:
    """Return a 32-bit hash of class weights, which differ between ranks if made from a rank's own rows."""
    return zlib.crc32(repr(weights.detach().tolist()).encode()) if isinstance(weights, Tensor) else 0
