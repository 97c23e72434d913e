"""A code of 8 bits for numbers of many magnitudes: one scale per block, and 256 values that lie closer near zero.

Equations (per block b):
    s_b = max|x_b|;   code = the nearest value of T to x / s_b;   decoded = s_b T[code]
    T = {0, 1} and, for e = 0 .. 6, the middles of n_e equal parts of [10^-e / 10, 10^-e]
    signed: n_e = 2^(6 - e), and all but 1 with both signs;   unsigned: n_e = 2^(7 - e)
Each decade has half as many steps as the one above. Without a sign only a zero becomes
zero: what is smaller than the smallest value becomes that one.
Paper:   Dettmers et al., ICLR 2022, arXiv:2110.02861 (dynamic tree quantization).
Unlike the paper: of numbers without a sign none is rounded to zero, since optimizers divide by their roots.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_DECADES = 7
_SHIFT = 14  # of a float32's bits: what is left are its exponent and nine bits, between which at most one limit lies
_FIRST = 0x33800000  # the bits of 2^-24, which is below all limits but 0


def encode(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks x (..., width) float32, (..., width) uint8, and their scales (...,) float32.

    A block with a non-finite number gets a non-finite scale.
    """
    size = x.abs()
    scale = size.amax(-1)
    size.div_(torch.where(scale == 0, 1.0, scale).unsqueeze(-1))
    # A binary search takes four times as long as two tables.
    below, limits = (table.to(x.device) for table in _tables(signed))
    bits = (size.view(torch.int32) - _FIRST).bitwise_right_shift_(_SHIFT).clamp_(0, below.numel() - 1)
    codes = torch.index_select(below, 0, bits.view(-1)).view(x.shape)
    codes += size > torch.index_select(limits, 0, codes.view(-1)).view(x.shape)
    if not signed:
        return codes.to(torch.uint8), scale
    last = (1 << 7) - 1
    return torch.where(x < 0, last - codes.clamp(max=last), last + codes).to(torch.uint8), scale


def decode(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the numbers of `encode`, (..., width) float32."""
    found = torch.index_select(values(signed).to(codes.device), 0, codes.reshape(-1).int())
    return found.view(codes.shape).mul_(scale.unsqueeze(-1))


@cache
def values(signed: bool) -> Tensor:
    """Return the 256 values, in rising order."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2 ** (_DECADES - signed - decade)
        middles = [10.0**-decade * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += [*middles, *(-one for one in middles)] if signed else middles
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")


@cache
def _tables(signed: bool) -> tuple[Tensor, Tensor]:
    """Return for the least number with each of the leading bits its place among the values >= 0, and their limits.

    The limit of a value is the middle between it and the next, and the zero's is 0 without a sign.
    """
    sizes = values(signed)[values(signed) >= 0]
    limits = torch.cat([(sizes[:-1] + sizes[1:]) / 2, torch.tensor([torch.inf])])
    if not signed:
        limits[0] = 0.0
    last = torch.ones(1).view(torch.int32).item() - _FIRST
    least = (torch.arange(int(last) >> _SHIFT, -1, -1, dtype=torch.int32).flip(0) << _SHIFT) + _FIRST
    places = torch.bucketize(least.view(torch.float32), limits, out_int32=True)
    places[0] = 0  # for everything below it too
    return places, limits
