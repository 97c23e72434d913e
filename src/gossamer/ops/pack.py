"""Packing of several tensors into one message, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(*tensors: Tensor) -> Tensor:
    """Return the bytes of `tensors`, (nbytes,) uint8. Pass the widest types first, so that `unpack` can alias them."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])


def unpack(message: Tensor, kinds: Sequence[tuple[int, torch.dtype]]) -> tuple[Tensor, ...]:
    """Return the tensors of a message by (numel, dtype), as views where the message is aligned, else copies."""
    found, start = [], 0
    for numel, dtype in kinds:
        part = message[start : start + numel * dtype.itemsize]
        start += part.numel()
        aligned = part.storage_offset() % dtype.itemsize == 0
        found.append((part if aligned else part.clone()).view(dtype))
    return tuple(found)
