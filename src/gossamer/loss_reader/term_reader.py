"""Reader of the terms of a loss: walks its graph from the root through sums, factors and divisors to the reductions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.loss_reader.graph_nodes import PASSING, REDUCING, GraphScalar, below, constant, name_of, number, saved
from gossamer.loss_reader.parameter_terms import is_free
from gossamer.loss_reader.reduced_terms import read_dot, read_sum, read_torch_loss, read_weighted
from gossamer.loss_reader.terms import Kind, Term, TermRows, times


def of_root(root: Tensor, given: Tensor | None, rows: TermRows) -> Iterable[Term]:
    """Return the terms of a loss, or of a tensor that backward is given gradients for."""
    if root.grad_fn is None:
        return [Term(Kind.FREE, "a parameter")]
    if root.numel() > 1 and given is not None:
        return [read_weighted(root, given, rows)]
    return _TermReader(rows).terms(root.grad_fn, 1.0 if given is None else float(given))


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
        if name in (*REDUCING, "Dot") and (losses := self._losses(node, name, under)) is not None:
            each = factor / len(losses) if name == "Mean" else factor
            return [times(term, "Mul", GraphScalar(each, is_computed=False)) for terms in losses for term in terms]
        if name in REDUCING:
            return [read_sum(node, factor, self.rows)]
        if name == "Dot":
            return [read_dot(node, under, factor, self.rows)]
        if hasattr(node, "_saved_reduction"):
            return [read_torch_loss(node, name, factor)]
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
