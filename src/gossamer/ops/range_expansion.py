"""FP8 with range expansion: a power of the numbers of a group that makes them fill the range of E4M3.

Equations (per group of numbers x; least and largest magnitudes l and h of those that are not zero):
    k = floor(16 log2(448^2 / 2) / log2(h / l)) / 16, and 1 <= k <= 16;   c = sqrt(l h)
    y = sign(x) (|x| / c)^k;   s = (h / c)^k / 448;   q = e4m3(y / s)
    decoded = sign(q) (|q| s)^(1 / k) c
Symbols: 448 the largest number of E4M3; q is stored in 8 bits, s, k and c in float32 per group.
Error:   of a number with |q| >= 2^-6 at most (1 + 2^-4)^(1/k) - 1 of itself; of a smaller one what 2^-10 in |q| is.
A group of equal numbers has k = 16, one of zeros alone decodes to zeros. Where k would be below 1, and so compress, it
is 1. Without a sign only a zero becomes zero: what is smaller than the least of E4M3, 2^-9, becomes that one.
Paper:   Xi et al., COAT, ICLR 2025, arXiv:2410.19313, section 4.
Unlike the paper's kernel: zeros do not count as least magnitude, which would make k small for a group with one zero.
"""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

_TOP, _LEAST = 448.0, 2.0**-9  # the largest number of E4M3, and the smallest above zero
_ROOM = log2(_TOP * _TOP / 2)  # binary orders of magnitude that a group may fill
_FARTHEST = 2.0**-120  # of the largest magnitude: what is smaller has no say in the range, whose power would overflow


def encode(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return of groups x (..., width) float32 the codes, (..., width) uint8, and s, k and c, (...,) float32.

    The codes are the bits of float8_e4m3fn. A group with a non-finite number gets a scale s that is not finite.
    """
    size = x.abs()
    most = size.amax(-1)
    least = torch.where(size > 0, size, torch.inf).amin(-1)
    empty = most == 0
    most = torch.where(empty, 1.0, most)
    least = torch.maximum(torch.where(empty, 1.0, least), most * _FARTHEST)
    power = (16 * _ROOM / (most.log2() - least.log2())).floor().div_(16).clamp_(1, 16)
    middle = most.sqrt() * least.sqrt()
    scale = (most / middle).pow_(power).div_(_TOP)
    size.div_(middle.unsqueeze(-1)).pow_(power.unsqueeze(-1)).div_(scale.unsqueeze(-1)).clamp_(max=_TOP)
    if signed:
        size.copysign_(x)
    else:
        size = torch.where(x > 0, size.clamp(min=_LEAST), size)
    return size.to(torch.float8_e4m3fn).view(torch.uint8), scale, power, middle


def decode(codes: Tensor, scale: Tensor, power: Tensor, middle: Tensor) -> Tensor:
    """Return the numbers of `encode`, (..., width) float32."""
    coded = codes.view(torch.float8_e4m3fn).float()
    size = coded.abs().mul_(scale.unsqueeze(-1)).pow_(power.reciprocal().unsqueeze(-1)).mul_(middle.unsqueeze(-1))
    return size.copysign_(coded)
