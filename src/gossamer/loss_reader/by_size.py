"""Fallback detection of operations that mix rows, by tensor sizes alone, where the rows could not be tracked through
the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gossamer.loss_reader.graph_nodes import (
    PASSING,
    dims_of,
    is_parameter,
    kept,
    nodes_below,
    op_name,
    saved,
    side_without_gradient,
)
from gossamer.loss_reader.normalized import is_normalized
from gossamer.loss_reader.row_dims import with_rows

_SEARCHED_NODES = 20_000


def across_rows(roots: Sequence[Tensor], rows: int) -> str:
    """Return the name of the first node below a loss's reductions that mixes rows; "" if there is none.

    A loss with such a node is no mean or sum over rows. `rows`: of this rank's batch.
    """
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
        name, below = op_name(node), [one for one, _ in node.next_functions]
        is_linear = name in PASSING or name in ("Add", "Sub", "Mul", "Div", "Stack", "Cat", "Mean", "Sum", "Dot")
        if node in top and (is_linear or hasattr(node, "_saved_reduction")):
            if is_linear and not (name in ("Mean", "Sum") and _reduces(node, below, rows)):
                top |= set(nodes_below(node))  # still above the reductions
        elif _takes_rows_together(node, name, below, rows):
            return name
        todo += below
    return ""


def _reduces(node: Any, below: list[Any], rows: int) -> bool:
    """Return whether a mean or sum is over rows, and not over features or losses."""
    sizes = tuple(node._saved_self_sym_sizes)
    if _is_of_losses(below[0]):
        return False
    return len(sizes) > 0 and 0 in dims_of(node, sizes) and (sizes[0] == rows or op_name(node) == "Mean")


def _is_of_losses(node: Any) -> bool:
    """Return whether the node stacks scalars."""
    while node is not None and op_name(node) in PASSING:
        node = node.next_functions[0][0]
    return node is not None and op_name(node) == "Stack" and all(_shape(one) == () for one, _ in node.next_functions)


def _takes_rows_together(node: Any, name: str, below: list[Any], rows: int) -> bool:
    if name in ("Cdist", "EuclideanDist"):
        left, right = _sizes(node, "x1"), _sizes(node, "x2")
        return len(left) == 2 == len(right) and left[0] == rows == right[0]
    if name == "Mm":
        left, right = _sizes(node, "self"), _sizes(node, "mat2")
        if len(left) != 2 or len(right) != 2 or any(one is None or is_parameter(one) for one in below[:2]):
            return False
        return bool(_holds(left[0], rows) and left[0] == right[1]) or left[1] == rows == right[0]
    if name == "Bmm":  # einsum computes matrix products by bmm
        left, right = _sizes(node, "self"), _sizes(node, "mat2")
        if len(left) != 3 or len(right) != 3 or left[0] != 1 or any(one is None or is_parameter(one) for one in below):
            return False
        return bool(_holds(left[1], rows) and left[1] == right[2]) or left[2] == rows == right[1]
    if name in _ELEMENTWISE:
        return _pairs(below, rows) or _is_centered(node, below, rows)
    if name in _SCATTERING:
        return saved(node, "dim") == 0 and any(_shape(one)[:1] == (rows,) for one in below)
    if name not in _TOGETHER:
        return False
    sizes = _sizes(node, "self", "result")
    return len(sizes) > 0 and sizes[0] == rows and 0 in dims_of(node, sizes)


def _holds(size: int, rows: int) -> bool:
    """Return whether a dimension may have the rows, or several views of them."""
    return size >= rows and size % rows == 0


def _shape(node: Any) -> tuple[int, ...]:
    """Return the sizes of a node's output before expansion; () if it has several outputs."""
    while node is not None and op_name(node) in ("Expand", "Clone"):
        node = node.next_functions[0][0]
    return tuple(node._input_metadata[0].shape) if node is not None and len(node._input_metadata) == 1 else ()


def _pairs(below: list[Any], rows: int) -> bool:
    """Return whether rows in a column are combined with rows in a line: every pair of rows."""
    if len(below) < 2 or any(one is None or is_parameter(one) for one in below[:2]):
        return False
    for first, second in (below[:2], below[1::-1]):
        column, line = _shape(first), _shape(second)
        if len(line) == 1 and len(column) == 2:
            line = (1, *line)
        is_pair = 1 < len(column) == len(line) and column[1] == 1 == line[0] and column[0] == line[1]
        if is_pair and _holds(column[0], rows):
            return True
    return False


def _is_centered(node: Any, below: list[Any], rows: int) -> bool:
    """Return whether the node multiplies by values of the rows that were normalized over the rows."""
    other = kept(node, side_without_gradient(node)) if None in below[:2] else None
    if other is None or other.numel() != rows or rows not in other.shape:
        return False
    return is_normalized(other, with_rows(other.shape, tuple(other.shape).index(rows)), rows)


def _sizes(node: Any, *names: str) -> tuple[int, ...]:
    for name in names:
        found = saved(node, f"{name}_sym_sizes")
        if found is None and (one := kept(node, name)) is not None:
            found = one.shape
        if found is not None:
            return tuple(found)
    made = node._input_metadata[0].shape if len(node._input_metadata) == 1 else ()
    return tuple(made)


_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Maximum", "Minimum"}
_SCATTERING = {"IndexAdd", "ScatterAdd", "ScatterReduce", "IndexReduce"}
_TOGETHER = {
    *("Mean", "Sum", "Prod", "Std", "Var", "StdMean", "VarMean", "Norm", "LinalgVectorNorm", "Max", "Min", "Amax"),
    *("Amin", "Aminmax", "Topk", "Sort", "SortStable", "Median", "Nanmedian", "Kthvalue", "Mode", "Quantile", "Cumsum"),
    *("Logsumexp", "LogSoftmax", "Softmax", "Roll", "Flip", "Cummax", "Cummin", "Logcumsumexp", "Renorm"),
}
