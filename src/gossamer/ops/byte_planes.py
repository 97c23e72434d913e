"""Byte planes of float32 numbers: bytes that resemble each other, side by side, for a lossless codec."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.ops.blocks import CHUNK

_SIGN = -(2**31)


def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split x (n,) float32 into exponents (n,), signs with 7 mantissa bits (n,), other 16 bits (2 n,), each uint8."""
    whole, numel = x.view(torch.int32), x.numel()
    exponents, leading = (torch.empty(numel, dtype=torch.uint8, device=x.device) for _ in range(2))
    trailing = torch.empty(numel, dtype=torch.int16, device=x.device)
    room = torch.empty(min(CHUNK, numel), dtype=torch.int32, device=x.device)
    for start in range(0, numel, CHUNK):
        bits = whole[start : start + CHUNK]
        here, end = room[: bits.numel()], start + bits.numel()
        trailing[start:end] = bits
        exponents[start:end] = torch.bitwise_right_shift(bits, 23, out=here)
        leading[start:end] = torch.bitwise_right_shift(bits, 16, out=here).bitwise_and_(0x7F)
        torch.bitwise_right_shift(bits, 24, out=here).bitwise_and_(0x80)
        leading[start:end] |= here.to(torch.uint8)
    return exponents, leading, trailing.view(torch.uint8)


def join(exponents: Tensor, leading: Tensor, trailing: Tensor) -> Tensor:
    """Return the float32 numbers of the planes that `split` returned."""
    numel = exponents.numel()
    out = torch.empty(numel, dtype=torch.float32, device=exponents.device)
    aligned = trailing.storage_offset() % 2 == 0
    low = (trailing if aligned else trailing.clone()).view(torch.int16)
    room = torch.empty(min(CHUNK, numel), dtype=torch.int32, device=out.device)
    for start in range(0, numel, CHUNK):
        bits = out[start : start + CHUNK].view(torch.int32)
        here, end = room[: bits.numel()], start + bits.numel()
        bits.copy_(low[start:end]).bitwise_and_(0xFFFF)
        here.copy_(exponents[start:end])
        here <<= 23
        bits |= here
        here.copy_(leading[start:end].view(torch.int8))  # the sign goes up to bit 31
        bits |= (here << 16) & (_SIGN | 0x7F0000)
    return out
