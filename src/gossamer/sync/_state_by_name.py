"""The state of exchanges by parameter name, as checkpoints keep it, however the buckets are cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import ExchangeState


def named(layout: Layout, state: ExchangeState) -> dict[str, Tensor]:
    """By "path@parameter": a method's own name for it, or cut up where it is shaped like the bucket, or else under the
    bucket's first parameter.
    """
    found: dict[str, Tensor] = {}
    for path, tensor in state.flatten():
        if "@" in path:
            found[path] = tensor
        elif tensor.shape == (layout.numel,):
            found.update({f"{path}@{name}": view for name, view in Bucket(layout, tensor).slices()})
        else:
            found[f"{path}@{layout.entries[0].name}"] = tensor
    return found


def refilled(layout: Layout, state: ExchangeState, tensors: Mapping[str, Tensor]) -> ExchangeState:
    """`state` with what `named` gave, of a bucket that may have been cut differently. What has another size than here
    (a factor of another rank, from before a change) stays as it is in `state`; all of it, where `tensors` are none.
    """
    fresh: dict[str, Tensor] = {}
    if not tensors:
        return state
    for path, tensor in state.flatten():
        if "@" in path:
            there = tensors[path]
            fresh[path] = there.to(tensor) if there.shape == tensor.shape else tensor
        elif tensor.shape == (layout.numel,):
            fresh[path] = torch.cat([tensors[f"{path}@{e.name}"].reshape(-1) for e in layout.entries]).to(tensor)
        else:
            fresh[path] = tensors[f"{path}@{layout.entries[0].name}"].to(tensor)
    return state.replace(fresh)
