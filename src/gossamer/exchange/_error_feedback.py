"""Arithmetic shared by the error-feedback exchanges: residuals in units that tolerate a zero, in tiles that fit the
cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.comm.message import ExchangeContext, ExchangeState
from gossamer.exchange import Exchange
from gossamer.spec.errors import bad_input

_NO_RATE = 1e-30  # dividing by less than this leaves float32
_IN_CACHE = 1 << 18  # numbers: several operations on so many read main memory once


def rate_of(at: ExchangeContext, track_lr: bool) -> float:
    """Return the factor of residuals besides the weight: the learning rate (0 if tiny), or 1 without `track_lr`."""
    if not track_lr:
        return 1.0
    return at.lr if abs(at.lr) > _NO_RATE else 0.0


def add_rounding_error(owed: Tensor, exact: Tensor, mean: Tensor, unit: float) -> None:
    """Add to `owed`, in place, the rounding error of `exact` to `mean`, times `unit`; it is equal on all ranks."""
    if mean.dtype != exact.dtype and unit:
        owed.add_(exact - mean, alpha=unit)


def settled(state: ExchangeState, unit: float, debt: Tensor) -> ExchangeState:
    """Add the residual "e" over `unit` to `debt`, in place; return the state without it, or as it is at a unit of 0."""
    if not unit:
        return state
    e = state.tensors["e"]
    debt.add_(e, alpha=1 / unit)
    return ExchangeState({**state.tensors, "e": torch.zeros_like(e)}, state.inner)


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same slices of all tensors, small enough to stay in the cache between two operations."""
    return zip(*(torch.split(t, _IN_CACHE) for t in tensors), strict=True)


def difference(target: Tensor, known: Tensor, share: float) -> Tensor:
    """Return target - known / share as a new tensor; zeros where the share is zero."""
    return torch.sub(target, known, alpha=1 / share) if share else torch.zeros_like(target)


def require_stateless(inner: Exchange) -> None:
    """Raise BadInput for an inner exchange with error feedback: both would send the same compression error."""
    if inner.traits.remembers:
        raise bad_input(
            wanted="an inner exchange without error feedback",
            got=type(inner).__name__,
            do="choose another inner exchange, e.g. {topk: {fraction: 0.01}}",
            key="inner",
        )
