"""The denominator of a loss (valid labels, rows, elements), read from its autograd graph before a backward pass frees
it.

A rank has some rows of a batch. One process with all of them computes, term by term,

    a mean over n things:   L = sum_r n_r L_r / sum_r n_r      (rank r counts n_r)
    a sum:                  L = sum_r L_r
    of parameters alone:    L = L_r on every rank               (a penalty on weights)

So the gradient of the global batch follows from the ranks' own gradients and their losses' denominators: valid labels,
class weights, rows, pixels. The graph holds them: the node of a loss keeps its reduction and its divisor. Some losses
cannot be read: the root of a mean, a product of two losses, a function without a graph. They are reported as unknown,
by name.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.loss_reader.row_flow import RowOrigin
from gossamer.loss_reader.row_paths import LossPath, followed
from gossamer.loss_reader.term_reader import of_root
from gossamer.loss_reader.terms import Kind, Term, TermRows

__all__ = ["BatchRows", "LossCount", "Kind", "read"]

_LEAST = 1.0  # divisor of an empty sum under max(1, n)
_NEAR_NODES = 48
_NEAR = 1e-6  # relative tolerance of equal counts
_NEAR_SEEN = 1e-4  # of counts seen in a graph: an epsilon may be added


@dataclass(frozen=True, slots=True)
class LossCount:
    """The loss denominators of one backward pass on this rank. `counts`: those of its terms that are means, without
    repetition.

    `shape`: hash of the kinds and factors of all terms, equal on ranks whose losses are computed alike.
    """

    kind: Kind
    counts: tuple[float, ...] = ()
    shape: int = 0
    kinds: int = 0  # hash of the kinds alone
    said: str = ""
    is_divided: bool = False  # whether the loop divided a sum by what may be a count
    is_least: bool = False  # whether it was divided by 1, and the graph shows no count of 1
    rows: int = 0  # of this rank
    strangers: int = -1  # hash of data combined with every row, equal on all ranks; 0: none, -1: unknown


class BatchRows(ABC):
    """The interface through which the reader asks about the batch that a loss belongs to."""

    rows: int  # of this rank; 0 where that is not known
    whole: int  # of all ranks
    first: int  # the dimension that has rows in its tensors

    @abstractmethod
    def counts(self) -> set[float]:
        """Return the values that a loss may divide by in this rank's rows: rows, valid labels, elements."""

    @abstractmethod
    def is_new(self, shape: int) -> bool:
        """Return whether a loss of this hash is new, so that its graph must be looked through."""

    @abstractmethod
    def is_mean(self, kinds: int) -> bool:
        """Return whether ranks found before that the divisor of such a sum is their own count."""

    @abstractmethod
    def origin(self) -> RowOrigin:
        """Return a reader of where tensors without a graph have rows. Call it only if `rows` is not 0."""


def read(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], batch: BatchRows) -> LossCount:
    """Return the denominators of the losses of a backward pass.

    `roots`: the losses; `gradients`: those passed to backward with them, None for a scalar's 1; `batch`: the batch that
    they belong to.
    """
    rows = TermRows(batch.rows, batch.first)
    every = [term for root, given in zip(roots, gradients, strict=True) for term in of_root(root, given, rows)]
    terms = [term for term in every if term.kind is not Kind.FREE]
    shape = zlib.crc32(repr(_made_alike(terms)).encode())
    known = {term.count for term in terms if term.kind is Kind.MEAN}
    if any(term.kind is Kind.DIVIDED or term.is_part_of_a_sum for term in terms):
        known |= batch.counts()
    alike = zlib.crc32(repr([kind for kind, _, _ in _made_alike(terms)]).encode())
    is_least = any(term.kind is Kind.DIVIDED and _is_least(term) for term in terms)
    terms = [_settled(term, known, batch, alike) for term in terms]
    strangers = -1
    if roots and rows.rows and batch.is_new(_made(roots, shape)):
        path = followed(roots, batch.origin())
        terms, strangers = _followed(path, every) or terms, path.strangers
    said = " + ".join(dict.fromkeys(term.what for term in terms)) or "parameters alone"
    kinds = {term.kind for term in terms}
    if not kinds:
        return LossCount(Kind.FREE, shape=shape, said=said)
    if Kind.UNKNOWN in kinds or len(kinds) > 1:
        mixed = "" if Kind.UNKNOWN in kinds else "a mean and a sum in one loss: "
        odd = next((term.what for term in terms if term.kind is Kind.UNKNOWN), said)
        return LossCount(Kind.UNKNOWN, shape=shape, said=mixed + odd)
    (kind,) = kinds
    if kind is Kind.SUM and len(terms) < len(every):
        said = "a sum over rows and a term of parameters alone, which counts once"
        return LossCount(Kind.UNKNOWN, shape=shape, said=said)
    counts = _distinct([term.count for term in terms])
    if kind in (Kind.MEAN, Kind.DIVIDED) and len(terms) == 1 and "/" in said and _is_zero(roots):
        kind, counts = Kind.MEAN, (0.0,)  # the mask kept nothing: the divisor only avoids nan
    is_divided = any(term.kind is Kind.DIVIDED for term in every)
    return LossCount(kind, counts, shape, alike, said, is_divided, is_least and counts != (0.0,), rows.rows, strangers)


def _followed(path: LossPath, terms: Sequence[Term]) -> list[Term]:
    """Return an unknown term if rows are mixed or misread on the way to the loss; nothing if they stay apart."""
    if path.together:
        return [Term(Kind.UNKNOWN, f"{path.together}, which takes the rows of a batch together")]
    if path.is_one_by_one and any(term.kind is Kind.MEAN for term in terms):
        return [Term(Kind.UNKNOWN, "a sum of means of single rows")]
    if odd := next((term for term in terms if _is_misread(term, path)), None):
        return [Term(Kind.UNKNOWN, f"{odd.what}, of what was reduced over rows in a way that cannot be read")]
    return []


def _is_misread(term: Term, path: LossPath) -> bool:
    """Return whether the node that is taken to have reduced the rows has not."""
    return term.by in path.after or (term.kind in (Kind.SUM, Kind.DIVIDED) and term.by in path.before)


def _made_alike(terms: Sequence[Term]) -> list[tuple[str, float, int]]:
    """Return the properties of the terms that must be equal on all ranks. Equal sums count once, as of a loop over
    rows.
    """
    found: list[tuple[str, float, int]] = []
    for term in terms:
        one = (_alike(term.kind), round(term.factor, 12), term.fixed)
        if term.kind is Kind.MEAN or one not in found:
            found.append(one)
    return found


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


def _settled(term: Term, known: set[float], batch: BatchRows, alike: int) -> Term:
    """Return the term with its final kind: a sum divided by a known count is a mean; divided by the rows of the whole
    batch, it is part of a sum. A factor that may be one over a count makes it unknown.
    """
    if term.kind is Kind.DIVIDED:
        if len(term.divisors) > 1 and (own := _own(term, known, batch)):  # by rows, and by accumulation steps
            return Term(Kind.MEAN, term.what, own, term.factor)
        is_seen = (
            batch.is_mean(alike)
            or not term.count
            or _is_among(term.count, known)
            or _is_among(term.count, term.seen(), _NEAR_SEEN)
        )
        if is_seen:
            return Term(Kind.MEAN, term.what, term.count, term.factor)
        is_whole = any(one.value == batch.whole for one in term.divisors) and batch.whole > batch.rows
        if is_whole and not term.is_computed:
            return Term(Kind.SUM, term.what, 1.0, term.factor)
    if term.is_part_of_a_sum and _is_among(1 / abs(term.factor), known):
        return Term(Kind.UNKNOWN, f"{term.what} times {term.factor:g}, which may be one over what this rank counts")
    return term


def _is_least(term: Term) -> bool:
    """Return whether a sum was divided by 1, which may be the lower bound of max(1, n) and no count."""
    return term.count == _LEAST and not _is_among(_LEAST, term.seen())


def _own(term: Term, known: set[float], batch: BatchRows) -> float:
    """Return the divisor, of several, that is this rank's count; 0 if none alone is."""
    values = [one.value for one in term.divisors]
    if batch.rows > 1 and batch.rows in values:
        return float(batch.rows)
    seen = term.seen()
    return max(
        (one for one in values if one > 1 and (_is_among(one, known) or _is_among(one, seen, _NEAR_SEEN))), default=0.0
    )


def _is_among(count: float, known: set[float], near: float = _NEAR) -> bool:
    return any(abs(count - one) <= near * one for one in known if one)


def _made(roots: Sequence[Tensor], shape: int) -> int:
    """Return a hash of the nodes next to the losses, equal for losses computed by the same operations: such a graph is
    not looked through again, so a large model costs no more than a small one.
    """
    todo: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    names: list[str] = []
    for node in todo:  # it grows
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        if len(seen) == _NEAR_NODES:
            break
        todo += [below for below, _ in node.next_functions]
    return zlib.crc32(" ".join(names).encode(), shape)
