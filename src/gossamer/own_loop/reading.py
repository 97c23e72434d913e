"""What a loss counts, read from its autograd graph before a backward pass frees it.

A rank sees some rows of a batch. One process with all of them computes, term by term,

    a mean over n things:   L = sum_r n_r L_r / sum_r n_r      (rank r counts n_r)
    a sum:                  L = sum_r L_r
    of parameters alone:    L = L_r on every rank               (a penalty on weights)

so the gradient of the whole batch is known from the ranks' own, if it is known what their losses count: valid labels,
class weights, rows, pixels. The graph tells: the node of a loss keeps its reduction and what it divided by. What it
cannot tell (the root of a mean, a product of two losses, a function without a graph) is said to be unknown, by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor

_FREE_NODES = 64  # a penalty on a parameter is a short way from it


class Kind(Enum):
    """How the ranks' values of a term make that of the whole batch."""

    MEAN = "mean"
    SUM = "sum"
    FREE = "free"  # the same on every rank: parameters alone
    DIVIDED = "divided"  # a sum divided by what may be a count of this rank's, or a constant
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss. `count`: what it was divided by (means; of a divided sum what may be a count)."""

    kind: Kind
    what: str  # the nodes, in words
    count: float = 1.0
    factor: float = 1.0  # what it was multiplied with outside of its reduction


@dataclass(frozen=True, slots=True)
class Counted:
    """What one backward pass counts on this rank. `counts`: of its terms that are means, without repetition.

    `shape` is the same on ranks whose losses are made alike: kinds and factors of all terms.
    """

    kind: Kind
    counts: tuple[float, ...] = ()
    shape: int = 0
    said: str = ""


Counts = Callable[[], set[float]]


def read(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], counts: Counts) -> Counted:
    """What the loss (or losses) of a backward pass count. `counts` gives what may be counted in this rank's batch:
    rows, valid labels, elements; it is asked only where a sum was divided by something.
    """
    terms = [term for root, given in zip(roots, gradients, strict=True) for term in _of_root(root, given)]
    terms = [term for term in terms if term.kind is not Kind.FREE]
    known = {term.count for term in terms if term.kind is Kind.MEAN}
    if any(term.kind is Kind.DIVIDED for term in terms):
        known |= counts()
    terms = [_settled(term, known) for term in terms]
    said = " + ".join(dict.fromkeys(term.what for term in terms)) or "parameters alone"
    shape = zlib.crc32(repr([(t.kind.value, round(t.factor, 12)) for t in terms]).encode())
    kinds = {term.kind for term in terms}
    if not kinds:
        return Counted(Kind.FREE, (), shape, said)
    if Kind.UNKNOWN in kinds or len(kinds) > 1:
        mixed = "" if Kind.UNKNOWN in kinds else "a mean and a sum in one loss: "
        odd = next((term.what for term in terms if term.kind is Kind.UNKNOWN), said)
        return Counted(Kind.UNKNOWN, (), shape, mixed + odd)
    (kind,) = kinds
    return Counted(kind, tuple(dict.fromkeys(term.count for term in terms)), shape, said)


def _settled(term: Term, known: set[float]) -> Term:
    """A sum divided by a count that is known is a mean."""
    if term.kind is Kind.DIVIDED and any(abs(term.count - one) <= 1e-6 * one for one in known if one):
        return Term(Kind.MEAN, term.what, term.count, term.factor)
    return term


def _of_root(root: Tensor, given: Tensor | None) -> Iterable[Term]:
    if root.grad_fn is None:
        return [Term(Kind.FREE, "a parameter")]
    if root.numel() > 1:  # a vector-Jacobian product is the sum of its rows
        return [_sum(root.grad_fn, tuple(root.shape), "backward of a tensor with gradients", 1.0)]
    return _terms(root.grad_fn, 1.0 if given is None else float(given))


def _terms(node: Any, factor: float) -> list[Term]:
    """The summands of a scalar."""
    name = _name(node)
    below = [one for one, _ in node.next_functions]
    if name == "AccumulateGrad":
        return [Term(Kind.FREE, "a parameter")]
    if name in _PASSING:
        return _terms(below[0], -factor if name == "Neg" else factor)
    if name in ("Add", "Sub"):
        return [term for one in below if one is not None for term in _terms(one, factor)]
    if name in ("Stack", "Cat"):
        return [term for one in below if one is not None for term in _terms(one, factor)]
    if name in ("Mul", "Div"):
        return _scaled(node, name, below, factor)
    if name in ("Mean", "Sum", "Dot") or hasattr(node, "_saved_reduction"):
        return [_reduced(node, name, below, factor)]
    if _is_free(node, None):
        return [Term(Kind.FREE, name)]
    return [Term(Kind.UNKNOWN, f"{name}, a function of a mean or sum that is not its multiple")]


def _scaled(node: Any, name: str, below: list[Any], factor: float) -> list[Term]:
    """A term times, or divided by, a number; or by what depends on parameters alone."""
    left, right = (*below, None)[:2]
    if left is not None and right is not None:
        return _product(name, _terms(left, factor), _terms(right, 1.0))
    other = _constant(node, "_saved_other" if left is not None else "_saved_self")
    terms = _terms(left if left is not None else right, factor)
    if other is None or other == 0.0 or (name == "Div" and left is None):
        return [
            Term(Kind.UNKNOWN, f"{name} with something that is no number") if t.kind is not Kind.FREE else t
            for t in terms
        ]
    return [_times(term, name, other) for term in terms]


def _product(name: str, first: list[Term], second: list[Term]) -> list[Term]:
    if all(t.kind is Kind.FREE for t in second):
        return first
    if name == "Mul" and all(t.kind is Kind.FREE for t in first):
        return second
    return [Term(Kind.UNKNOWN, f"{name} of two terms that both depend on the batch")]


def _times(term: Term, name: str, other: float) -> Term:
    """A sum that is divided may be a mean of what this rank counts; anything else keeps its kind."""
    if name == "Div" and term.kind in (Kind.SUM, Kind.DIVIDED) and other != 1.0:
        return Term(Kind.DIVIDED, f"{term.what} / {other:g}", term.count * abs(other), term.factor)
    factor = term.factor * other if name == "Mul" else term.factor / other
    return Term(term.kind, term.what, term.count, factor)


def _reduced(node: Any, name: str, below: list[Any], factor: float) -> Term:
    """The summand that a reduction makes."""
    if name == "Mean":
        stacked = below[0] is not None and _name(below[0]) == "Stack" and _is_of_scalars(below[0])
        if stacked:
            return _one(_terms(below[0], factor), name)
        if _is_free(below[0], tuple(node._saved_self_sym_sizes)):
            return Term(Kind.FREE, "a mean of parameters")
        return Term(Kind.MEAN, f"a mean over {node._saved_self_sym_numel}", float(node._saved_self_sym_numel), factor)
    if name in ("Sum", "Dot"):
        if below[0] is not None and _name(below[0]) == "Stack" and _is_of_scalars(below[0]):
            return _one(_terms(below[0], factor), name)
        sizes = tuple(node._saved_self_sym_sizes) if name == "Sum" else ()
        return _sum(below[0] if name == "Sum" else node, sizes, "a sum", factor)
    if node._saved_reduction == 2:
        return Term(Kind.SUM, f"{name} (reduction='sum')", 1.0, factor)
    if name.startswith("NllLoss"):
        total = float(node._saved_total_weight)
        return Term(Kind.MEAN, f"{name} over {total:g}", total, factor)
    count = float(node._saved_self.numel()) if name != "MultiMarginLoss" else float(node._saved_self.shape[0])
    return Term(Kind.MEAN, f"{name} over {count:g}", count, factor)


def _one(terms: list[Term], name: str) -> Term:
    """Stacked losses that are alike are one term; else it cannot be told."""
    kept = [t for t in terms if t.kind is not Kind.FREE]
    if not kept:
        return Term(Kind.FREE, "parameters alone")
    if len({(t.kind, t.count) for t in kept}) == 1:
        return kept[0]
    return Term(Kind.UNKNOWN, f"{name} of losses that count differently")


def _sum(node: Any, sizes: tuple[int, ...], what: str, factor: float) -> Term:
    """A sum over a tensor of `sizes`, made by `node`: each number by itself, unless it was divided before."""
    term, top = Term(Kind.SUM, what, 1.0, factor), node
    while node is not None:
        name, below = _name(node), [one for one, _ in node.next_functions]
        if name in _PASSING:
            node = below[0]
        elif name == "Mean" and 0 in _dims(node):  # a sum over features of a mean over rows
            count = float(prod(node._saved_self_sym_sizes[dim] for dim in _dims(node)))
            return Term(Kind.MEAN, f"a mean over {count:g}", count, term.factor)
        elif name in ("Mul", "Div") and None in (*below, None)[:2]:
            left = below[0] is not None
            other = _saved(node, "_saved_other" if left else "_saved_self")
            if isinstance(other, Tensor) and other.numel() > 1 and _adds_up(other):
                return Term(Kind.UNKNOWN, "a sum with weights that add up to 1, over this rank's rows alone")
            number = _number(other)
            if number is not None and number != 0.0 and (left or name == "Mul"):
                term = _times(term, name, number)
            node = below[0] if left else below[1]
        else:
            break
    if node is None or _is_free(top, sizes):
        return Term(Kind.FREE, "parameters alone")
    return term


def _adds_up(weights: Tensor) -> bool:
    return weights.is_floating_point() and abs(float(weights.sum()) - 1.0) < 1e-3 and not bool((weights == 1).any())


def _is_free(node: Any, sizes: tuple[int, ...] | None) -> bool:
    """Whether all that it depends on are parameters, each as large as what is reduced: no rows came in on the way."""
    todo, seen = [node], 0
    while todo:
        one = todo.pop()
        if one is None:
            continue
        seen += 1
        name = _name(one)
        if seen > _FREE_NODES or name in _MIXING:
            return False
        if name == "AccumulateGrad":
            if sizes is not None and tuple(one.variable.shape) != sizes:
                return False
            continue
        if name in ("Norm", "LinalgVectorNorm"):
            sizes = tuple(one._saved_self.shape)
        elif name in ("Sum", "Mean"):
            sizes = tuple(one._saved_self_sym_sizes)
        todo += [below for below, _ in one.next_functions]
    return seen > 0


def _is_of_scalars(stack: Any) -> bool:
    return all(
        meta.shape == torch.Size([]) for one, _ in stack.next_functions if one is not None for meta in _shapes(one)
    )


def _shapes(node: Any) -> Sequence[Any]:
    return tuple(node._input_metadata)


def _dims(node: Any) -> tuple[int, ...]:
    """The dimensions that a mean reduced; of a mean over all, every one."""
    sizes = node._saved_self_sym_sizes
    if not hasattr(node, "_saved_dim") or not node._saved_dim:
        return tuple(range(len(sizes)))
    return tuple((dim if dim < 2**63 else dim - 2**64) % len(sizes) for dim in node._saved_dim)


def _constant(node: Any, name: str) -> float | None:
    return _number(_saved(node, name))


def _saved(node: Any, name: str) -> Any:
    return getattr(node, name, None)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _name(node: Any) -> str:
    """ "Mul" of MulBackward0."""
    return str(node.name()).rpartition("::")[2].split("Backward")[0]


_PASSING = {
    *("Neg", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "ToCopy"),
    *("Permute", "Transpose", "T", "Expand", "Contiguous"),
}
# What brings a batch in: a product of a parameter with something that needs no gradient, rows that were looked up.
_MIXING = {
    *("Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Addmv", "Dot", "Linear", "Convolution", "ConvolutionOverrideable"),
    *("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "NativeLayerNorm", "NativeBatchNorm", "CudnnRnn"),
    *("ThnnFusedLstmCell", "ScaledDotProductFlashAttentionForCpu", "Expand"),
}
