"""Reader of the terms of a loss: walks its graph from the root through sums, factors and divisors to the reductions."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.loss_reader.graph_nodes import (
    PASSING,
    REDUCING,
    GraphScalar,
    below,
    constant,
    nodes_below,
    number,
    op_name,
    saved,
    side_without_gradient,
)
from gossamer.loss_reader.parameter_terms import depends_on_parameters_only
from gossamer.loss_reader.reduced_terms import read_dot, read_sum, read_torch_loss, read_weighted
from gossamer.loss_reader.terms import Kind, Term, TermRows, times


def of_root(root: Tensor, given: Tensor | None, rows: TermRows) -> Iterable[Term]:
    """Return the terms of a loss, or of a tensor that backward is given gradients for."""
    if root.grad_fn is None:
        return [Term(Kind.FREE, "a parameter")]
    if root.numel() > 1 and given is not None:
        return [read_weighted(root, given, rows)]
    return _TermReader(rows).terms(root.grad_fn, 1.0 if given is None else float(given))


class _NoVector(Exception):
    """A node that is no vector of losses, as torch.stack makes it."""


@dataclass(frozen=True, slots=True)
class _TermReader:
    """The reader of the graph above the reduced tensors."""

    rows: TermRows

    def terms(self, node: Any, factor: float) -> list[Term]:
        """Return the summands of a scalar."""
        name, under = op_name(node), below(node)
        if name == "AccumulateGrad":
            return [Term(Kind.FREE, "a parameter")]
        if name in PASSING:
            return self.terms(under[0], -factor if name == "Neg" else factor)
        if name in ("Add", "Sub", "Stack", "Cat"):
            return [term for one in nodes_below(node) for term in self.terms(one, factor)]
        if name in ("Mul", "Div"):
            return self._scaled(node, name, factor)
        if name in (*REDUCING, "Dot"):
            with suppress(_NoVector):
                losses = self._losses(node, name, under)
                each = factor / len(losses) if name == "Mean" else factor
                return [times(term, "Mul", GraphScalar(each, is_computed=False)) for terms in losses for term in terms]
        if name in REDUCING:
            return [read_sum(node, factor, self.rows)]
        if name == "Dot":
            return [read_dot(node, under, factor, self.rows)]
        if hasattr(node, "_saved_reduction"):
            return [read_torch_loss(node, name, factor)]
        if depends_on_parameters_only(node, None):
            return [Term(Kind.FREE, name)]
        return [Term(Kind.UNKNOWN, f"{name}, a function of a mean or sum that is not its multiple")]

    def _losses(self, node: Any, name: str, under: list[Any]) -> list[list[Term]]:
        """Return the terms of each loss in a mean, sum or weighted sum of losses; raise _NoVector over rows."""
        if name != "Dot":
            return self._elements(under[0])
        weights = saved(node, side_without_gradient(node, second="tensor"))
        if None not in under[:2] or not isinstance(weights, Tensor):
            raise _NoVector
        return _each_times(self._elements(nodes_below(node)[0]), "Mul", weights)

    def _elements(self, node: Any) -> list[list[Term]]:
        """Return the terms of each element of a vector of losses; raise _NoVector if it is no such vector."""
        if node is None:
            raise _NoVector
        if _is_scalar(node):
            return [self.terms(node, 1.0)]
        name, under = op_name(node), below(node)
        if name in ("Stack", "Cat"):
            return [terms for one in under for terms in self._stacked(one, name)]
        if name in PASSING:
            found = self._elements(under[0])
            return _each_times(found, "Mul", -torch.ones(())) if name == "Neg" else found
        if name in ("Mul", "Div"):
            return self._elements_times(node, name)
        raise _NoVector

    def _stacked(self, node: Any, name: str) -> list[list[Term]]:
        """Return the elements that an input of Stack or Cat adds; one without a gradient has no terms."""
        if name == "Cat":
            return self._elements(node)
        found = [[]] if node is None else self._elements(node)
        if len(found) != 1:
            raise _NoVector
        return found

    def _elements_times(self, node: Any, name: str) -> list[list[Term]]:
        under = nodes_below(node)
        if len(under) > 1:
            left, right = under
            free = right if name == "Div" or depends_on_parameters_only(right, None) else left
            if not depends_on_parameters_only(free, None):
                raise _NoVector
            return self._elements(left if free is right else right)
        side = side_without_gradient(node)
        other = saved(node, side)
        if (name == "Div" and side == "self") or not isinstance(other, (Tensor, int, float)):
            raise _NoVector
        return _each_times(self._elements(under[0]), name, torch.as_tensor(other))

    def _scaled(self, node: Any, name: str, factor: float) -> list[Term]:
        """Return the terms times, or divided by, a number or a function of parameters alone."""
        under = nodes_below(node)
        if len(under) > 1:
            return _product(name, self.terms(under[0], factor), self.terms(under[1], 1.0))
        side = side_without_gradient(node)
        other = constant(node, side)
        terms = self.terms(under[0], factor)
        if other is None or (name == "Div" and (side == "self" or (other.value == 0.0 and not other.is_computed))):
            return [_unreadable(term, name) for term in terms]
        if other.value == 0.0 and name == "Mul":
            return []  # a term with weight 0 has no gradient
        return [times(term, name, other) for term in terms]


def _unreadable(term: Term, name: str) -> Term:
    """Return the term of a product or quotient with something that is no number."""
    return term if term.kind is Kind.FREE else Term(Kind.UNKNOWN, f"{name} with something that is no number")


def _each_times(losses: list[list[Term]], name: str, weights: Tensor) -> list[list[Term]]:
    """Return the losses times, or divided by, `weights`: one for all, or one for each."""
    numbers = weights.flatten().tolist()
    if len(numbers) not in (1, len(losses)) or (name == "Div" and 0.0 in numbers):
        raise _NoVector
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
