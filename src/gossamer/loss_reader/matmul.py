"""Matrix products, attention, and layers."""

from __future__ import annotations

from typing import Any

from gossamer.loss_reader import row_dims as lay
from gossamer.loss_reader.graph_nodes import kept, made, saved
from gossamer.loss_reader.normalized import refuse_standardised
from gossamer.loss_reader.row_dims import RowDims, RowsMixed
from gossamer.loss_reader.row_flow import (
    FREE,
    LOST,
    GraphStep,
    RowFlow,
    RowPath,
    RowPlace,
    all_kept,
    known_of,
    need_layouts,
)


def _product(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of mm, bmm, mv, addmm and baddbmm."""
    first = {"Addmm": 1, "Baddbmm": 1, "Addmv": 1}.get(name, 0)
    names = ("mat1", "mat2") if name == "Addmm" else ("batch1", "batch2") if name == "Baddbmm" else ("self", "mat2")
    names = ("self", "vec") if name == "Mv" else ("mat", "vec") if name == "Addmv" else names
    pair = [
        one if one is not None else flow.entered(kept(node, named), _sizes_of(node, named), is_input=at == 0)
        for at, (one, named) in enumerate(zip(inputs[first : first + 2], names, strict=True))
    ]
    if inputs[first] is None:
        refuse_standardised(name, kept(node, names[0]), pair[0], flow.origin.rows)
    need_layouts(name, [*inputs[:first], *pair], is_linear=len(known_of(pair)) < 2)
    sizes = made(node)
    if not known_of(pair):
        return known_of(inputs)[0] if known_of(inputs) else FREE
    left, right = (one.layout if one.way is RowPath.ROWS else None for one in pair)
    made_layout = _of_product(flow, left, right, sizes, name)
    if name == "Addmm" and first and (bias := inputs[0]) is not None and bias.way is RowPath.ROWS:
        made_layout = lay.joined([made_layout, bias.layout], sizes, name)
    return RowPlace(RowPath.ROWS, made_layout)


def _sizes_of(node: Any, named: str) -> tuple[int, ...]:
    return tuple(saved(node, f"{named}_sym_sizes") or ())


def _of_product(
    flow: RowFlow, left: RowDims | None, right: RowDims | None, sizes: tuple[int, ...], name: str
) -> RowDims:
    """Return the layout of (..., i, k) times (..., k, j). Raises RowsMixed if rows are summed over or paired."""
    is_vector = "v" in name.lower()[-1:]
    left = None if left is None else _without_inner(left, len(left) - 1, name)
    right = None if right is None else _without_inner(right, len(right) - (1 if is_vector else 2), name)
    if is_vector:
        return left[:-1] if left is not None else lay.plain(sizes)
    layouts = [one for one in (left, right) if one is not None]
    if left is not None and right is not None and lay.labels(left[-2]) and lay.labels(right[-1]):
        if lay.is_loose(left[-2]) and lay.is_loose(right[-1]):
            return lay.joined([left, lay.stripped(right, len(right) - 1)], sizes, name)
        if lay.is_alike(left, right):
            raise RowsMixed(name)
        flow.strangers |= lay.parts_of((left[-2], right[-1]))
        layouts = [right] if lay.is_part(left) and not lay.is_part(right) else [left]
    return lay.joined(layouts, sizes, name)


def _without_inner(layout: RowDims, at: int, name: str) -> RowDims:
    """Return a factor's layout with its summed dimension `at` reduced to 1."""
    if lay.labels(layout[at]) and not lay.is_loose(layout[at]):
        raise RowsMixed(name)
    left = lay.without(layout, (at,))
    return (*left[:at], ((1, ""),), *left[at:])


def _attention(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of scaled_dot_product_attention: (..., steps, features)."""
    need_layouts(name, inputs, is_linear=False)
    known = known_of(inputs[:3])
    for one in known:
        if any(lay.labels(dim) and not lay.is_loose(dim) for dim in one.layout[-2:]):
            raise RowsMixed(name)
    place = known[0].layout if known else known_of(inputs)[0].layout
    sizes = made(node)
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, LOST)
    flow.put(node, 0, RowPlace(RowPath.ROWS, (*place[:-2], *lay.plain(sizes[-2:]))))
    return flow.made(node, 0)


def _layer(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of a layer whose first dimension has rows, or that works along its last dimensions alone."""
    known, sizes = known_of(inputs), made(node)
    if inputs and inputs[0] is None:
        named = "indices" if name.startswith("Embedding") else "input"
        given = kept(node, named)
        entered = flow.entered(given, given.shape if given is not None else sizes, is_input=True)
        refuse_standardised(name, given, entered, flow.origin.rows)
        known = [entered, *known] if entered.way is not RowPath.FREE else known
    need_layouts(name, known, is_linear=False)
    return all_kept(flow, node, name, known[0].layout) if known else FREE


def _embedded(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    indices, sizes = kept(node, "indices"), made(node)
    entered = flow.entered(indices, sizes[:-1], is_input=True)
    if entered.way is not RowPath.ROWS:
        return FREE
    if name != "Embedding":
        return flow.entered_by_size(sizes)  # bags of several indices
    return RowPlace(RowPath.ROWS, (*entered.layout, ((sizes[-1], ""),)))


def _pairs(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of the distances between every row of one matrix and every row of another."""
    need_layouts(name, inputs, is_linear=False)
    sizes = made(node)
    given = [
        one if one is not None else flow.entered(kept(node, named), (), is_input=False)
        for one, named in zip((*inputs, None)[:2], ("x1", "x2"), strict=False)
    ]
    known = [one for one in given if one.way is RowPath.ROWS]
    if name == "Pdist" or any(lay.labels(one.layout[-1]) and not lay.is_loose(one.layout[-1]) for one in known):
        raise RowsMixed(name)
    if (
        len(known) == 2
        and all(lay.labels(one.layout[-2]) for one in known)
        and not all(lay.is_loose(one.layout[-2]) for one in known)
        and lay.is_alike(known[0].layout, known[1].layout)
    ):
        raise RowsMixed(name)
    turned = [
        (*one.layout[:-2], one.layout[-2], ((1, ""),))
        if one is given[0]
        else (*one.layout[:-2], ((1, ""),), one.layout[-2])
        for one in known
    ]
    flow.strangers |= lay.strangers(turned, len(sizes))
    return RowPlace(RowPath.ROWS, lay.joined(turned, sizes, name))


_ATTENTIONS = {
    *("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
}
_LAYERS = ("Convolution", "NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "Linear", "MkldnnRnnLayer")
ENTERING: dict[str, GraphStep] = {
    **dict.fromkeys(("Mm", "Bmm", "Mv", "Addmm", "Baddbmm", "Addmv"), _product),
    **dict.fromkeys(_LAYERS, _layer),
    **dict.fromkeys(("Embedding", "EmbeddingBag"), _embedded),
}
STEPS: dict[str, GraphStep] = {
    **ENTERING,
    **dict.fromkeys(_ATTENTIONS, _attention),
    **dict.fromkeys(("Cdist", "EuclideanDist", "Pdist"), _pairs),
}
