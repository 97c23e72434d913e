"""Exchange state by parameter name, as checkpoints store it, independent of how the buckets are divided."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import ExchangeState


def state_by_name(layout: Layout, state: ExchangeState) -> dict[str, Tensor]:
    """Return the state of a bucket's exchange by "path@parameter".

    A tensor shaped like the bucket is cut up by parameter. Any other keeps the method's own name for it, or else gets
    the name of the bucket's first parameter.
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
    """Return `state` with the tensors of `named`, possibly of a differently divided bucket; unchanged without any.

    A tensor with another size than in `state` (a factor of another rank, from before a change) is not loaded.
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
