"""What proximal operators share: soft thresholding, and the better one of several candidates by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def soft_threshold(v: Tensor, threshold: float) -> Tensor:
    """Return `v` moved towards 0 by `threshold`, and exactly 0 where it is not further away than that."""
    return v - v.clamp(-threshold, threshold)


def best_of(v: Tensor, step: float, penalty: Callable[[Tensor], Tensor], candidates: Sequence[Tensor]) -> Tensor:
    """Return by element the candidate x with the least step * penalty(x) + (x - |v|)^2 / 2, with the sign of `v`.

    The candidates are not negative. Of equal ones the first is taken.
    """
    size = v.abs()
    worth = torch.stack([step * penalty(x) + (x - size).square() / 2 for x in candidates])
    chosen = torch.stack(list(candidates)).gather(0, worth.argmin(0, keepdim=True)).squeeze(0)
    return with_sign_of(v, chosen)


def with_sign_of(v: Tensor, size: Tensor) -> Tensor:
    """Return `size` with the sign of `v`; 0 is positive."""
    return torch.where(v < 0, -size, size) + 0.0
