"""The terms of a loss: its summands, the denominator of each, and the factors and divisors applied to it.

A summand is a mean, a sum, or of parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gossamer.loss_reader.graph_nodes import GraphScalar
from gossamer.loss_reader.sum_counts import counts_of


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
            found |= counts_of(node)
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
