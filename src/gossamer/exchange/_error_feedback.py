"""What feedback methods share: units that a zero does not break, and one memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.comm.message import ExchangeContext
from gossamer.exchange import Exchange
from gossamer.spec.errors import bad_input

_NO_RATE = 1e-30  # dividing by less than this leaves float32
_IN_CACHE = 1 << 18  # numbers: several operations on so many read main memory once


def rate_of(at: ExchangeContext, track_lr: bool) -> float:
    """What residuals are scaled by besides the weight: the learning rate, or one."""
    if not track_lr:
        return 1.0
    return at.lr if abs(at.lr) > _NO_RATE else 0.0


def add_rounding_error(owed: Tensor, exact: Tensor, mean: Tensor, unit: float) -> None:
    """Add to `owed`, in place, what was lost when `exact` became `mean`, the same on all ranks."""
    if mean.dtype != exact.dtype and unit:
        owed.add_(exact - mean, alpha=unit)


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same pieces of all tensors, small enough to stay in the cache between two operations."""
    return zip(*(torch.split(t, _IN_CACHE) for t in tensors), strict=True)


def difference(target: Tensor, known: Tensor, share: float) -> Tensor:
    """A new target - known / share; where the share is zero nothing can be said: zeros."""
    return torch.sub(target, known, alpha=1 / share) if share else torch.zeros_like(target)


def require_stateless(inner: Exchange) -> None:
    """Refuse an inner exchange that remembers: this one and that one would both send what is missing."""
    if inner.traits.remembers:
        raise bad_input(
            wanted="an exchange that does not remember what it did not send",
            got=type(inner).__name__,
            do="put this method around what is inside it, or leave one of the two out",
            key="inner",
        )
