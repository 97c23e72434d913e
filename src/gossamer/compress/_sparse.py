"""What exchanges that gather values and their places share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.ops.pack import pack, unpack
from gossamer.wire.bucket import Layout


def count_of(fraction: float, numel: int) -> int:
    """Entries that are sent of `numel`: at least one, where there is one."""
    return min(numel, max(1, round(fraction * numel)))


def packed(flat: Tensor, places: Tensor, capacity: int) -> Tensor:
    """`capacity` (value, place) pairs in 8 bytes each; where `places` are fewer, zeros at place 0 fill the message."""
    values, missing = flat[places], capacity - places.numel()
    where = places.int()
    return pack(values, values.new_zeros(missing), where, where.new_zeros(missing))


def mean_of(messages: Tensor, capacity: int, shares: Sequence[float], layout: Layout) -> Tensor:
    """sum_i shares[i] message_i, summed in rank order, in the type of the bucket."""
    mean = torch.zeros(layout.numel, dtype=torch.float32, device=messages.device)
    for message, share in zip(messages, shares, strict=True):
        values, where = unpack(message, ((capacity, torch.float32), (capacity, torch.int32)))
        mean.index_add_(0, where, values, alpha=share)
    return mean.to(layout.dtype)


def only(flat: Tensor, places: Tensor) -> Tensor:
    """`flat` at `places`, zero elsewhere."""
    kept = torch.zeros_like(flat)
    kept[places] = flat[places]
    return kept
