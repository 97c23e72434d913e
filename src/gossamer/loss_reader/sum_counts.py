"""Counts that a node in the graph of a sum shows: elements summed, elements that a mask keeps, or their weights."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from gossamer.loss_reader.graph_nodes import REDUCING, kept, op_name, side_without_gradient, signed, sizes_before


def counts_of(node: Any) -> set[float]:
    """Return the counts that the node shows; an empty set if it shows none."""
    name = op_name(node)
    if name in REDUCING:
        sizes = sizes_before(node)
        found = {float(prod(sizes)), *(float(size) for size in sizes if size > 1)}
        if name == "Nansum" and (summed := kept(node, "self")) is not None:
            found.add(float((~summed.isnan()).sum()))
        return found
    if name in ("Mul", "Div"):
        other = kept(node, side_without_gradient(node))
        return set() if other is None or not other.dim() else {float(other.sum()), float(torch.count_nonzero(other))}
    if name == "Dot":
        other = kept(node, side_without_gradient(node, second="tensor"))
        return set() if other is None else {float(other.sum()), float(torch.count_nonzero(other))}
    if name in ("Where", "MaskedFill"):
        through = kept(node, "condition" if name == "Where" else "mask")
        if through is None:
            return set()
        count, whole = float(through.sum()), float(prod(node._input_metadata[0].shape))
        many = whole / max(1, through.numel())
        return {count, through.numel() - count, count * many, (through.numel() - count) * many}
    if name.startswith("NllLoss"):
        target = kept(node, "target")
        found = set() if target is None else {float((target != signed(node._saved_ignore_index)).sum())}
        return found | {float(node._saved_total_weight)}
    if hasattr(node, "_saved_reduction"):
        one = kept(node, "self")
        return set() if one is None else {float(one.numel()), *(float(size) for size in one.shape if size > 1)}
    return set()
