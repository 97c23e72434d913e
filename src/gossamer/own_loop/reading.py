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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor

_OWN_WEIGHTS = "a sum with weights that add up to 1, over this rank's rows alone"
_SEARCHED_NODES = 20_000
_NEAR_NODES = 48
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
    is_computed: bool = False  # whether it was divided by a tensor, so by something of this rank's rows, or by a number
    divisors: tuple[float, ...] = ()  # one by one, of a divided sum
    fixed: int = 0  # 32 bits of what it has of its own that must be the same on all ranks: class weights

    @property
    def is_part_of_a_sum(self) -> bool:
        """Whether it was multiplied with what may be one over a count."""
        return self.kind is Kind.SUM and 0 < abs(self.factor) < 1


@dataclass(frozen=True, slots=True)
class Counted:
    """What one backward pass counts on this rank. `counts`: of its terms that are means, without repetition.

    `shape` is the same on ranks whose losses are made alike: kinds and factors of all terms.
    """

    kind: Kind
    counts: tuple[float, ...] = ()
    shape: int = 0
    kinds: int = 0  # the same, whatever the factors
    said: str = ""
    is_divided: bool = False  # whether a sum was divided in the loop, by what was found to be a count


class Batch(ABC):
    """What a reader may ask of the batch that a loss is of."""

    rows: int  # of this rank; 0 where that is not known
    whole: int  # of all ranks

    @abstractmethod
    def counts(self) -> set[float]:
        """What may be counted in this rank's rows: rows, valid labels, elements."""

    @abstractmethod
    def is_new(self, shape: int) -> bool:
        """Whether a loss made like this has not been seen before: then its graph is looked through."""

    @abstractmethod
    def is_mean(self, kinds: int) -> bool:
        """Whether the ranks have found before that what such a sum is divided by is their own count."""


def read(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], batch: Batch) -> Counted:
    """What the loss (or losses) of a backward pass count."""
    every = [term for root, given in zip(roots, gradients, strict=True) for term in _of_root(root, given)]
    terms = [term for term in every if term.kind is not Kind.FREE]
    shape = zlib.crc32(repr([(_alike(t.kind), round(t.factor, 12), t.fixed) for t in terms]).encode())
    known = {term.count for term in terms if term.kind is Kind.MEAN}
    if any(term.kind is Kind.DIVIDED or term.is_part_of_a_sum for term in terms):
        known |= batch.counts()
    alike = zlib.crc32(repr([_alike(t.kind) for t in terms]).encode())
    terms = [_settled(term, known, batch, alike) for term in terms]
    if roots and batch.is_new(_made(roots, shape)) and (found := _across_rows(roots, batch.rows)):
        terms = [Term(Kind.UNKNOWN, f"{found}, which takes the rows of a batch together")]
    said = " + ".join(dict.fromkeys(term.what for term in terms)) or "parameters alone"
    kinds = {term.kind for term in terms}
    if not kinds:
        return Counted(Kind.FREE, shape=shape, said=said)
    if Kind.UNKNOWN in kinds or len(kinds) > 1:
        mixed = "" if Kind.UNKNOWN in kinds else "a mean and a sum in one loss: "
        odd = next((term.what for term in terms if term.kind is Kind.UNKNOWN), said)
        return Counted(Kind.UNKNOWN, shape=shape, said=mixed + odd)
    (kind,) = kinds
    if kind is Kind.SUM and len(terms) < len(every):
        said = "a sum over rows and a term of parameters alone, which counts once"
        return Counted(Kind.UNKNOWN, shape=shape, said=said)
    counts = _distinct([term.count for term in terms])
    if kind in (Kind.MEAN, Kind.DIVIDED) and len(terms) == 1 and "/" in said and _is_zero(roots):
        counts = (0.0,)  # nothing was let through: what it was divided by only keeps it from being nan
    is_divided = any(term.kind is Kind.DIVIDED for term in every)
    return Counted(kind, counts, shape, alike, said, is_divided)


def _alike(kind: Kind) -> str:
    return Kind.MEAN.value if kind is Kind.DIVIDED else kind.value


def _distinct(counts: Sequence[float]) -> tuple[float, ...]:
    found: list[float] = []
    for count in counts:
        if not _is_among(count, set(found)) and not (count == 0.0 and 0.0 in found):
            found.append(count)
    return tuple(found)


def _is_zero(roots: Sequence[Tensor]) -> bool:
    return all(not bool(root.detach().any()) for root in roots)


def _settled(term: Term, known: set[float], batch: Batch, alike: int) -> Term:
    """A sum divided by a count that is known is a mean; divided by the rows of the whole batch, it is a part of a sum.
    Multiplied with one over a count, nobody can tell.
    """
    if term.kind is Kind.DIVIDED:
        if len(term.divisors) > 1 and (
            own := _own(term.divisors, known, batch)
        ):  # by rows, and by passes before a step
            return Term(Kind.MEAN, term.what, own, term.factor)
        is_whole = batch.whole in term.divisors and batch.whole > batch.rows
        if _is_among(term.count, known) or (term.is_computed and not is_whole) or batch.is_mean(alike):
            return Term(Kind.MEAN, term.what, term.count, term.factor)
        if is_whole and not term.is_computed:
            return Term(Kind.SUM, term.what, 1.0, term.factor)
    if term.is_part_of_a_sum and _is_among(1 / abs(term.factor), known):
        return Term(Kind.UNKNOWN, f"{term.what} times {term.factor:g}, which may be one over what this rank counts")
    return term


def _own(divisors: Sequence[float], known: set[float], batch: Batch) -> float:
    """Which of several numbers that a sum was divided by is this rank's count; 0 where it is none of them alone."""
    if batch.rows > 1 and batch.rows in divisors:
        return float(batch.rows)
    return max((one for one in divisors if one > 1 and _is_among(one, known)), default=0.0)


def _is_among(count: float, known: set[float]) -> bool:
    return any(abs(count - one) <= 1e-6 * one for one in known if one)


def _of_root(root: Tensor, given: Tensor | None) -> Iterable[Term]:
    if root.grad_fn is None:
        return [Term(Kind.FREE, "a parameter")]
    if root.numel() > 1 and given is not None:  # a vector-Jacobian product is a sum of what its rows are given
        return [_weighted(_sum(root.grad_fn, tuple(root.shape), "backward of a tensor with gradients", 1.0), given)]
    return _terms(root.grad_fn, 1.0 if given is None else float(given))


def _weighted(term: Term, given: Tensor) -> Term:
    """A sum whose rows count what they are given: all the same, or each its own."""
    first = float(given.flatten()[0])
    if term.kind is not Kind.SUM or not first:
        return term
    if bool((given == first).all()):
        return term if first == 1.0 else _times(term, "Div", Given(1 / first, is_computed=False))
    return Term(Kind.UNKNOWN, _OWN_WEIGHTS) if _adds_up(given) else term


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
    if name in ("Mean", "Sum", "Dot") and (losses := _losses(node, name, below)) is not None:
        each = factor / len(losses) if name == "Mean" else factor
        return [_times(term, "Mul", Given(each, is_computed=False)) for terms in losses for term in terms]
    if name in ("Mean", "Sum", "Dot") or hasattr(node, "_saved_reduction"):
        return [_reduced(node, name, below, factor)]
    if _is_free(node, None):
        return [Term(Kind.FREE, name)]
    return [Term(Kind.UNKNOWN, f"{name}, a function of a mean or sum that is not its multiple")]


def _losses(node: Any, name: str, below: list[Any]) -> list[list[Term]] | None:
    """The terms of each of the losses that a mean, sum or product with weights is of; None where it is of rows."""
    if name != "Dot":
        return _elements(below[0])
    left = below[0] is not None
    kept = _saved(node, "_saved_tensor" if left else "_saved_self")
    found = _elements(below[0] if left else below[1]) if None in below[:2] else None
    return None if found is None or not isinstance(kept, Tensor) else _each_times(found, "Mul", kept)


def _elements(node: Any) -> list[list[Term]] | None:
    """The terms of each number of a vector of losses, as torch.stack makes it; None where it is not one."""
    if node is None:
        return None
    if _is_scalar(node):
        return [_terms(node, 1.0)]
    name, below = _name(node), [one for one, _ in node.next_functions]
    if name in ("Stack", "Cat"):
        each: list[list[list[Term]] | None] = [
            _elements(one) if one is not None else ([[]] if name == "Stack" else None) for one in below
        ]
        if any(one is None or (name == "Stack" and len(one) != 1) for one in each):
            return None
        return [terms for one in each if one is not None for terms in one]
    if name in _PASSING:
        found = _elements(below[0])
        return _each_times(found, "Mul", -torch.ones(())) if name == "Neg" and found is not None else found
    if name in ("Mul", "Div"):
        left, right = (*below, None)[:2]
        if left is not None and right is not None:
            free = right if name == "Div" or _is_free(right, None) else left
            return _elements(left if free is right else right) if _is_free(free, None) else None
        kept = _saved(node, "_saved_other" if left is not None else "_saved_self")
        found = _elements(left if left is not None else right) if left is not None or name == "Mul" else None
        if found is not None and isinstance(kept, (Tensor, int, float)):
            return _each_times(found, name, torch.as_tensor(kept))
    return None


def _each_times(losses: list[list[Term]], name: str, weights: Tensor) -> list[list[Term]] | None:
    numbers = weights.flatten().tolist()
    if len(numbers) not in (1, len(losses)) or (name == "Div" and 0.0 in numbers):
        return None
    numbers = numbers * len(losses) if len(numbers) == 1 else numbers
    return [
        [_times(term, name, Given(number, is_computed=False)) for term in terms] if number else []
        for number, terms in zip(numbers, losses, strict=True)
    ]


def _is_scalar(node: Any) -> bool:
    """Whether it makes one number without a dimension: a loss, and not a row."""
    return all(not tuple(meta.shape) for meta in node._input_metadata)


def _scaled(node: Any, name: str, below: list[Any], factor: float) -> list[Term]:
    """A term times, or divided by, a number; or by what depends on parameters alone."""
    left, right = (*below, None)[:2]
    if left is not None and right is not None:
        return _product(name, _terms(left, factor), _terms(right, 1.0))
    other = _constant(node, "_saved_other" if left is not None else "_saved_self")
    terms = _terms(left if left is not None else right, factor)
    if other is not None and other.value == 0.0 and name == "Mul":
        return []  # a term that is switched off: its gradient is nothing
    if other is None or (other.value == 0.0 and not other.is_computed) or (name == "Div" and left is None):
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


def _times(term: Term, name: str, other: Given) -> Term:
    """A sum that is divided may be a mean of what this rank counts; anything else keeps its kind."""
    is_sum, value = term.kind in (Kind.SUM, Kind.DIVIDED), other.value
    if is_sum and name == "Mul" and other.is_computed and abs(value) < 1:  # with one over what was computed
        name, value = "Div", 1 / value
    if is_sum and name == "Div":
        is_computed = term.is_computed or other.is_computed
        what, divisors = f"{term.what} / {value:g}", (*term.divisors, abs(value))
        return replace(
            term,
            kind=Kind.DIVIDED,
            what=what,
            count=term.count * abs(value),
            is_computed=is_computed,
            divisors=divisors,
        )
    if not value:
        return Term(Kind.UNKNOWN, f"{term.what} {'times' if name == 'Mul' else '/'} 0")
    factor = term.factor * value if name == "Mul" else term.factor / value
    return replace(term, factor=factor)


def _reduced(node: Any, name: str, below: list[Any], factor: float) -> Term:
    """The summand that a reduction makes."""
    if name == "Mean":
        if _is_free(below[0], tuple(node._saved_self_sym_sizes)):
            return Term(Kind.FREE, "a mean of parameters")
        return Term(Kind.MEAN, f"a mean over {node._saved_self_sym_numel}", float(node._saved_self_sym_numel), factor)
    if name in ("Sum", "Dot"):
        if name == "Dot":
            return _dot(node, below, factor)
        return _sum(below[0], tuple(node._saved_self_sym_sizes), "a sum", factor)
    if node._saved_reduction == 2:
        fixed = _bits(_saved(node, "_saved_weight")) if name.startswith("NllLoss") else 0
        return Term(Kind.SUM, f"{name} (reduction='sum')", 1.0, factor, fixed=fixed)
    if name.startswith("NllLoss"):
        total = float(node._saved_total_weight)
        return Term(Kind.MEAN, f"{name} over {total:g}", total, factor, fixed=_bits(_saved(node, "_saved_weight")))
    count = float(node._saved_self.numel()) if name != "MultiMarginLoss" else float(node._saved_self.shape[0])
    per_class = _saved(node, "_saved_pos_weight")
    is_fixed = isinstance(per_class, Tensor) and per_class.dim() < node._saved_self.dim()
    return Term(Kind.MEAN, f"{name} over {count:g}", count, factor, fixed=_bits(per_class) if is_fixed else 0)


def _bits(weights: Any) -> int:
    """32 of class weights: made of a rank's own rows, they are another's."""
    return zlib.crc32(repr(weights.detach().tolist()).encode()) if isinstance(weights, Tensor) else 0


def _dot(node: Any, below: list[Any], factor: float) -> Term:
    """A sum of losses times what each counts."""
    left = below[0] is not None
    kept = _saved(node, "_saved_tensor" if left else "_saved_self")
    if None not in below[:2] or not isinstance(kept, Tensor):
        return Term(Kind.UNKNOWN, "Dot of two tensors that both depend on the batch")
    if _adds_up(kept):
        return Term(Kind.UNKNOWN, _OWN_WEIGHTS)
    return _sum(below[0] if left else below[1], tuple(kept.shape), "a sum", factor)


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
                return Term(Kind.UNKNOWN, _OWN_WEIGHTS)
            number = _number(other)
            if number is not None and (number.value or number.is_computed) and (left or name == "Mul"):
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
        if seen > _FREE_NODES or (name not in _BY_ELEMENT and name not in _PASSING and name != "AccumulateGrad"):
            return False
        if name in ("Select", "Unbind", "Slice") and not _is_parameter(one.next_functions[0][0]):
            return False
        if name in ("Mul", "Div") and any(
            (given := _constant(one, kept)) is not None and given.is_computed
            for kept, below in zip(("_saved_self", "_saved_other"), one.next_functions[::-1], strict=False)
            if below[0] is not None
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
        todo += [below for below, _ in one.next_functions]
    return seen > 0


def _made(roots: Sequence[Tensor], shape: int) -> int:
    """The same where losses are made by the same steps, as far as those next to them go: what has been looked through
    is not looked through again, and a large model costs no more than a small one.
    """
    todo: deque[Any] = deque(root.grad_fn for root in roots)
    seen: set[Any] = set()
    names: list[str] = []
    while todo and len(seen) < _NEAR_NODES:
        node = todo.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            todo.extend(below for below, _ in node.next_functions)
    return zlib.crc32(" ".join(names).encode(), shape)


def _across_rows(roots: Sequence[Tensor], rows: int) -> str:
    """The first step below the reductions of a loss that takes rows together: then it is no mean or sum of rows."""
    if rows < 2:
        return ""
    todo = [root.grad_fn for root in roots]
    top = set(todo)
    seen: set[Any] = set()
    while todo and len(seen) < _SEARCHED_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, below = _name(node), [one for one, _ in node.next_functions]
        is_linear = name in _PASSING or name in ("Add", "Sub", "Mul", "Div", "Stack", "Cat", "Mean", "Sum", "Dot")
        if node in top and (is_linear or hasattr(node, "_saved_reduction")):
            if is_linear and not (name in ("Mean", "Sum") and _reduces(node, below, rows)):
                top |= {one for one in below if one is not None}  # still above what is reduced
        elif _takes_rows_together(node, name, below, rows):
            return name
        todo += below
    return ""


def _reduces(node: Any, below: list[Any], rows: int) -> bool:
    """Whether a mean or sum is that over rows, and not over features or losses."""
    sizes = tuple(node._saved_self_sym_sizes)
    if _elements(below[0]) is not None:
        return False
    return len(sizes) > 0 and 0 in _dims(node) and (sizes[0] == rows or _name(node) == "Mean")


def _takes_rows_together(node: Any, name: str, below: list[Any], rows: int) -> bool:
    if name in ("Cdist", "EuclideanDist"):
        left, right = _sizes(node, "x1"), _sizes(node, "x2")
        return len(left) == 2 == len(right) and left[0] == rows == right[0]
    if name == "Mm":
        left, right = _sizes(node, "self"), _sizes(node, "mat2")
        if len(left) != 2 or len(right) != 2 or any(one is None or _is_parameter(one) for one in below[:2]):
            return False
        return bool(_holds(left[0], rows) and left[0] == right[1]) or left[1] == rows == right[0]
    if name == "Bmm":  # einsum's way to a product of two matrices
        left, right = _sizes(node, "self"), _sizes(node, "mat2")
        if len(left) != 3 or len(right) != 3 or left[0] != 1 or any(one is None or _is_parameter(one) for one in below):
            return False
        return bool(_holds(left[1], rows) and left[1] == right[2]) or left[2] == rows == right[1]
    if name in _ELEMENTWISE:
        return _pairs(below, rows) or _is_normalised(node, below, rows)
    if name in _CUTTING:
        sizes = _sizes(node, "self")
        return 0 < len(sizes) <= 2 and sizes[0] == rows and _saved(node, "_saved_dim") == 0 and not _is_all(node, rows)
    if name in _SCATTERING:
        return _saved(node, "_saved_dim") == 0 and any(_shape(one)[:1] == (rows,) for one in below)
    if name not in _TOGETHER:
        return False
    sizes = _sizes(node, "self", "result")
    return len(sizes) > 0 and sizes[0] == rows and 0 in _dims(node, sizes)


def _holds(size: int, rows: int) -> bool:
    """Whether a dimension is of the rows, or of several views of them."""
    return size >= rows and size % rows == 0


def _shape(node: Any) -> tuple[int, ...]:
    """Of what a node makes, before it was spread out; () where that is several things."""
    while node is not None and _name(node) in ("Expand", "Clone"):
        node = node.next_functions[0][0]
    return tuple(node._input_metadata[0].shape) if node is not None and len(node._input_metadata) == 1 else ()


def _pairs(below: list[Any], rows: int) -> bool:
    """Whether rows in a column meet rows in a line: every pair of them."""
    if len(below) < 2 or any(one is None or _is_parameter(one) for one in below[:2]):
        return False
    for first, second in (below[:2], below[1::-1]):
        column, line = _shape(first), _shape(second)
        if len(line) == 1 and len(column) == 2:
            line = (1, *line)
        is_pair = 1 < len(column) == len(line) and column[1] == 1 == line[0] and column[0] == line[1]
        if is_pair and _holds(column[0], rows):
            return True
    return False


def _is_normalised(node: Any, below: list[Any], rows: int) -> bool:
    """Whether it is a product with numbers of the rows whose mean is 0 or 1, as their own statistics make it."""
    if None not in below[:2]:
        return False
    kept = _saved(node, "_saved_other" if below[0] is not None else "_saved_self")
    if not isinstance(kept, Tensor) or not kept.is_floating_point() or kept.numel() != rows or not kept.dim():
        return False
    wide = kept.detach().double()
    if bool((wide == wide.round()).all()):
        return False  # signs, masks
    mean, size = float(wide.mean()), float(wide.abs().mean())
    return min(abs(mean), abs(mean - 1.0)) < 1e-6 * size


def _is_all(node: Any, rows: int) -> bool:
    """Whether a cut leaves nothing out."""
    if _name(node) == "Split":
        return bool(node._saved_split_size >= rows)
    return bool(node._saved_start == 0 and rows <= node._saved_end < 2**63 and node._saved_step == 1)


def _is_parameter(node: Any) -> bool:
    """A parameter, as it is or turned."""
    while _name(node) in _PASSING:
        node = node.next_functions[0][0]
        if node is None:
            return False
    return _name(node) == "AccumulateGrad"


def _sizes(node: Any, *names: str) -> tuple[int, ...]:
    for name in names:
        found = _saved(node, f"_saved_{name}_sym_sizes")
        if found is None and isinstance(kept := _saved(node, f"_saved_{name}"), Tensor):
            found = kept.shape
        if found is not None:
            return tuple(found)
    made = node._input_metadata[0].shape if len(node._input_metadata) == 1 else ()
    return tuple(made)


def _dims(node: Any, sizes: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The dimensions that a step reduced; of one over all, every one."""
    sizes = tuple(node._saved_self_sym_sizes) if sizes is None else sizes
    given = _saved(node, "_saved_dim")
    if given is None:
        given = _saved(node, "_saved_dims")
    if given is None or given == () or not sizes:
        return tuple(range(len(sizes)))
    dims = (given,) if isinstance(given, int) else given
    return tuple((dim if dim < 2**63 else dim - 2**64) % len(sizes) for dim in dims)


@dataclass(frozen=True, slots=True)
class Given:
    """A number in a loss. `is_computed`: it is a tensor's, and not one that was written in the loop."""

    value: float
    is_computed: bool


def _constant(node: Any, name: str) -> Given | None:
    return _number(_saved(node, name))


def _saved(node: Any, name: str) -> Any:
    return getattr(node, name, None)


def _number(value: Any) -> Given | None:
    if isinstance(value, Tensor):
        return Given(float(value), _is_tensors_own(value)) if value.numel() == 1 else None
    return Given(float(value), is_computed=False) if isinstance(value, (int, float)) else None


def _is_tensors_own(kept: Tensor) -> bool:
    """Whether a node keeps a tensor of the loop, and not a Python number that torch made one of: such a one gives way
    to the type of any tensor.
    """
    if kept.dim():
        return True
    other = torch.ones((), dtype=torch.float16 if kept.is_floating_point() else torch.int8)
    return torch.result_type(kept, other) != other.dtype or kept.dtype == other.dtype


def _name(node: Any) -> str:
    """ "Mul" of MulBackward0."""
    return str(node.name()).rpartition("::")[2].split("Backward")[0]


_PASSING = {
    *("Neg", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "ToCopy"),
    *("Permute", "Transpose", "T", "Contiguous"),
}
# What makes one number, or an order, of several.
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Maximum", "Minimum"}
_CUTTING = {"Slice", "Split"}
_SCATTERING = {"IndexAdd", "ScatterAdd", "ScatterReduce", "IndexReduce"}
_TOGETHER = {
    *("Mean", "Sum", "Prod", "Std", "Var", "StdMean", "VarMean", "Norm", "LinalgVectorNorm", "Max", "Min", "Amax"),
    *("Amin", "Aminmax", "Topk", "Sort", "SortStable", "Median", "Nanmedian", "Kthvalue", "Mode", "Quantile", "Cumsum"),
    *("Logsumexp", "LogSoftmax", "Softmax", "Roll", "Flip", "Cummax", "Cummin", "Logcumsumexp", "Renorm"),
}
# What a penalty on parameters is made of. Any other function may bring rows in: a layer, one of somebody's own.
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
