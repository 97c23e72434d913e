"""Trust ratios: the length of a layer's update relative to the norm of its parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ratios(params: Sequence[Tensor], updates: Sequence[Tensor], *, largest: float, trust: float = 1.0) -> list[Tensor]:
    """Return trust min(|w|, largest) / |u| of each pair, 1 where one of both is 0; of the updates' type, 0-dim."""
    found = []
    for w, u in zip(torch._foreach_norm(list(params)), torch._foreach_norm(list(updates)), strict=True):
        ratio = trust * w.clamp(max=largest) / u
        found.append(torch.where((w > 0) & (u > 0), ratio, torch.ones_like(ratio)))
    return found


def unit(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor over its norm; zeros stay zeros."""
    norms = torch._foreach_norm(list(tensors))
    return [t / torch.where(n > 0, n, torch.ones_like(n)) for t, n in zip(tensors, norms, strict=True)]
