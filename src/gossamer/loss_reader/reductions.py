"""Reductions, sorts and losses: operations that make one element, or an order, of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.loss_reader import row_dims as lay
from gossamer.loss_reader.graph_nodes import dims_of, kept, made, saved
from gossamer.loss_reader.indexing import broadcast
from gossamer.loss_reader.normalized import has_spread_one, is_normalized
from gossamer.loss_reader.row_dims import RowDims, RowsMixed
from gossamer.loss_reader.row_flow import SUMMED, GraphStep, RowFlow, RowPath, RowPlace, known_of, need_layouts


def _sum(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    one = known_of(inputs)[0]
    if one.way is not RowPath.ROWS:
        return one
    sizes = made(node)
    dims = dims_of(node, lay.sizes_of(one.layout))
    if rows := [at for at in dims if lay.labels(one.layout[at]) and not _stays(one.layout, at, dims)]:
        if any(label.startswith(lay.PICKED) for at in rows for label in lay.labels(one.layout[at])):
            raise RowsMixed(f"{name} over rows in an order of their own")
        return SUMMED
    return RowPlace(RowPath.ROWS, _reduced(one.layout, dims, sizes))


def _stays(layout: RowDims, at: int, dims: Sequence[int]) -> bool:
    """Return whether a single row beside other elements keeps a dimension."""
    return lay.is_loose(layout[at]) and len(dims) < len(layout)


def _reduced(layout: RowDims, dims: Sequence[int], sizes: Sequence[int]) -> RowDims:
    return lay.without(layout, dims, keeps=len(sizes) == len(layout))


def _along(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of norms, maxima, softmax and sorts, which must not run along the row dimension."""
    need_layouts(name, inputs, is_linear=False)
    one = known_of(inputs)[0]
    dims = dims_of(node, lay.sizes_of(one.layout))
    if any(lay.labels(one.layout[at]) and not _stays(one.layout, at, dims) for at in dims):
        raise RowsMixed(name)
    for output in range(len(node._input_metadata)):
        sizes = made(node, output)
        if len(sizes) == len(one.layout):
            found_layout = tuple(
                dim if lay.size_of(dim) == size else ((size, ""),) for dim, size in zip(one.layout, sizes, strict=True)
            )
            flow.put(node, output, RowPlace(RowPath.ROWS, found_layout))
        else:
            flow.put(node, output, RowPlace(RowPath.ROWS, lay.without(one.layout, dims)))
    return flow.made(node, 0)


def _loss(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of a torch loss: classes in the second dimension, or elementwise."""
    need_layouts(name, inputs, is_linear=False)
    layouts = [one.layout for one in known_of(inputs)]
    sizes = made(node)
    target = kept(node, "target")
    if (
        target is not None
        and name == "MseLoss"
        and is_normalized(target, layouts[0], flow.origin.rows)
        and has_spread_one(target, layouts[0])
    ):
        raise RowsMixed(f"{name} with a target that was normalized over rows")
    if not name.startswith(("NllLoss", "Multi")):
        joined = lay.joined(layouts, broadcast([lay.sizes_of(one) for one in layouts]), name)
        return RowPlace(RowPath.ROWS, joined) if saved(node, "reduction") == 0 else SUMMED
    classes = 0 if len(layouts[0]) == 1 else 1
    if lay.labels(layouts[0][classes]) and not lay.is_loose(layouts[0][classes]):
        raise RowsMixed(name)
    return RowPlace(RowPath.ROWS, lay.without(layouts[0], (classes,))) if sizes else SUMMED


def _dot(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of a dot product with parameters or a tensor without a graph: a sum over rows."""
    known = known_of(inputs)
    if len(known) > 1 and len(inputs) > 1:
        need_layouts(name, inputs, is_linear=False)
        lay.joined([one.layout for one in known], lay.sizes_of(known[0].layout), name)
    return SUMMED if known[0].way is RowPath.ROWS else known[0]


_ALONG = {
    *("Prod", "Std", "Var", "StdMean", "VarMean", "Norm", "LinalgVectorNorm", "Max", "Min", "Amax", "Amin", "Aminmax"),
    *(
        "Topk",
        "Sort",
        "SortStable",
        "Median",
        "Nanmedian",
        "Kthvalue",
        "Mode",
        "Quantile",
        "Cumsum",
        "Cumprod",
        "Logsumexp",
    ),
    *("LogSoftmax", "Softmax", "SafeSoftmax", "MaskedSoftmax", "Roll", "Flip", "Cummax", "Cummin", "Logcumsumexp"),
}
_LOSSES = {
    *(
        "NllLoss",
        "NllLoss2D",
        "MseLoss",
        "SmoothL1Loss",
        "HuberLoss",
        "BinaryCrossEntropy",
        "BinaryCrossEntropyWithLogits",
    ),
    *("SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"),
}
STEPS: dict[str, GraphStep] = {
    **dict.fromkeys(("Sum", "Mean", "Nansum"), _sum),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(("Dot", "Vdot"), _dot),
}
