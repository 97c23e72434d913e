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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.loss_reader.row_flow import RowOrigin
from gossamer.loss_reader.row_paths import LossPath, followed
from gossamer.loss_reader.terms import Kind, Term, TermRows, of_root

__all__ = ["BatchRows", "LossCount", "Kind", "read"]

_LEAST = 1.0  # that a sum is divided by where max(1, n) keeps it from being divided by nothing
_NEAR_NODES = 48
_NEAR = 1e-6  # counts that differ by less, as a part of them, are one
_NEAR_SEEN = 1e-4  # of what a graph shows, as something small may have been added to it


@dataclass(frozen=True, slots=True)
class LossCount:
    """What one backward pass counts on this rank. `counts`: of its terms that are means, without repetition.

    `shape` is the same on ranks whose losses are made alike: kinds and factors of all terms.
    """

    kind: Kind
    counts: tuple[float, ...] = ()
    shape: int = 0
    kinds: int = 0  # the same, whatever the factors
    said: str = ""
    is_divided: bool = False  # whether a sum was divided in the loop, by what was found to be a count
    is_least: bool = False  # whether it was divided by 1, and the graph shows nothing of which there is one
    rows: int = 0  # of this rank
    strangers: int = -1  # 32 bits of what met every row, and must be the same on all ranks; 0: nothing did, -1: unknown


class BatchRows(ABC):
    """What a reader may ask of the batch that a loss is of."""

    rows: int  # of this rank; 0 where that is not known
    whole: int  # of all ranks
    first: int  # the dimension that has rows in its tensors

    @abstractmethod
    def counts(self) -> set[float]:
        """What may be counted in this rank's rows: rows, valid labels, elements."""

    @abstractmethod
    def is_new(self, shape: int) -> bool:
        """Whether a loss made like this has not been seen before: then its graph is looked through."""

    @abstractmethod
    def is_mean(self, kinds: int) -> bool:
        """Whether the ranks have found before that what such a sum is divided by is their own count."""

    @abstractmethod
    def origin(self) -> RowOrigin:
        """Where tensors without a graph have rows. Only where there are rows."""


def read(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], batch: BatchRows) -> LossCount:
    """What the loss (or losses) of a backward pass count."""
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
        kind, counts = Kind.MEAN, (0.0,)  # nothing was let through: what it was divided by only keeps it from being nan
    is_divided = any(term.kind is Kind.DIVIDED for term in every)
    return LossCount(kind, counts, shape, alike, said, is_divided, is_least and counts != (0.0,), rows.rows, strangers)


def _followed(path: LossPath, terms: Sequence[Term]) -> list[Term]:
    """What stands against it that terms are added up over ranks; nothing where rows stay apart."""
    if path.together:
        return [Term(Kind.UNKNOWN, f"{path.together}, which takes the rows of a batch together")]
    if path.is_one_by_one and any(term.kind is Kind.MEAN for term in terms):
        return [Term(Kind.UNKNOWN, "a sum of means of single rows")]
    if odd := next((term for term in terms if _is_misread(term, path)), None):
        return [Term(Kind.UNKNOWN, f"{odd.what}, of what was reduced over rows in a way that cannot be read")]
    return []


def _is_misread(term: Term, path: LossPath) -> bool:
    """Whether the step that is taken to have reduced the rows has not."""
    return term.by in path.after or (term.kind in (Kind.SUM, Kind.DIVIDED) and term.by in path.before)


def _made_alike(terms: Sequence[Term]) -> list[tuple[str, float, int]]:
    """What must be the same on all ranks. Sums that are alike are one: a loop over rows has one of each."""
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
    """A sum divided by a count that is known is a mean; divided by the rows of the whole batch, it is a part of a sum.
    Multiplied with one over a count, nobody can tell.
    """
    if term.kind is Kind.DIVIDED:
        if len(term.divisors) > 1 and (own := _own(term, known, batch)):  # by rows, and by passes before a step
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
    """Whether a sum was divided by 1, which may be no count: where nothing is counted, that is the least it can be."""
    return term.count == _LEAST and not _is_among(_LEAST, term.seen())


def _own(term: Term, known: set[float], batch: BatchRows) -> float:
    """Which of several numbers that a sum was divided by is this rank's count; 0 where it is none of them alone."""
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
    """The same where losses are made by the same steps, as far as those next to them go: what has been looked through
    is not looked through again, and a large model costs no more than a small one.
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
