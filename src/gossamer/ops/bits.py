"""Packing of small integers into bytes: 1, 2 or 4 bits each, the first in the lowest bits.

One multiplication of a wide word brings the bits of all its bytes together; one look-up of a byte spreads them again.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_WORD = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # as wide as the numbers in a byte have bytes


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the low `bits` of codes (..., n) int8, contiguous, 8 / bits dividing n, to (..., n bits / 8) uint8.

    `codes` is overwritten.
    """
    size = 8 // bits
    words = codes.view(_WORD[bits])
    words &= sum((2**bits - 1) << 8 * i for i in range(size))
    words *= sum(1 << 8 * (size - 1) - (8 - bits) * i for i in range(size))  # byte i arrives at bit bits i of the top
    words >>= 8 * (size - 1)
    return words.to(torch.uint8)


def unpack(packed: Tensor, bits: int, codes: Tensor) -> None:
    """Unpack (..., m) uint8 to codes (..., 8 m / bits) int8, contiguous, as two's complement.

    With one bit, 0 becomes 1 and 1 becomes -1.
    """
    table = _table(bits, packed.device)
    torch.index_select(table, 0, packed.int().view(-1), out=codes.view(-1).view(_WORD[bits]))


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    """Return (256,) words: the numbers in each byte, as one byte each."""
    byte = torch.arange(256, dtype=torch.int32).unsqueeze(-1)
    codes = (byte >> bits * torch.arange(8 // bits, dtype=torch.int32)) & (2**bits - 1)
    signed = 1 - 2 * codes if bits == 1 else codes - (codes >> bits - 1) * 2**bits
    words: Tensor = signed.to(torch.int8).view(_WORD[bits]).flatten()
    return words.to(device)
