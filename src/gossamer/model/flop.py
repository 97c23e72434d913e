"""Multiplications and additions (flop) of one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count


def flop_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Return the flop of one operator call with output `out`; 0 if it is elementwise. Tensors may be fake."""
    packet = getattr(func, "overloadpacket", None)
    if packet in UNCOUNTED:
        return float(UNCOUNTED[packet](*(getattr(x, "shape", x) for x in args)))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # shapes: (batch, heads, sequence, head)


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the flop of a grouped matmul.

    Shapes: both (groups, ., .), or one or both 2-dim, with the groups along one dim.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])


# torch 2.13 counts the attention kernels of GPUs and not that of CPUs, nor grouped products; to be removed when it does
UNCOUNTED: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._grouped_mm: _grouped,
}
