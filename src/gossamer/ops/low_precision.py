"""Conversion to narrower floating-point types, with a power of two per block so that nothing overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.ops.blocks import as_rows, scratch, spans
from gossamer.ops.quantize import SMALLEST, inverse, largest, number

_EXPONENT = 0x7F800000  # of a float32
_FAR = 2.0**112  # a scale beside which a number of 16 bits may leave float32
_MOST = torch.finfo(torch.float32).max


def narrow(x: Tensor, block: int, top: int, scales: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
    """Divide x (..., numel) float32 by a power of two per block and write it to `out` (..., numel), in its type.

    The powers go to `scales` (..., ceil(numel / block)). The largest magnitude of a block is then below 2^(top + 1),
    and at least 2^top unless it was below 2^(top - 127), so bits are lost by rounding and by underflow only. A block
    with a non-finite number gets an infinite scale. What is lost of x is written to `lost`, which may be x.
    """
    powers, given = scales, out
    rows, room, scales, out = as_rows(x), scratch(x, block), as_rows(scales), as_rows(out)
    up, down, smallest, infinite = number(2.0**top), number(2.0**-top), number(SMALLEST), number(float("inf"))
    exponent = torch.tensor(_EXPONENT, dtype=torch.int32, device="cpu")
    for cut in spans(rows, block):
        views = zip(cut.numbers(rows), cut.scratch(room), cut.blocks(scales), cut.numbers(out), strict=True)
        for values, here, scale, target in views:
            most = largest(values)
            power = torch.bitwise_and(most.view(torch.int32), exponent).view(torch.float32)  # infinite for NaN
            small = most < smallest
            power = torch.where(small, power, power.clamp(min=2.0 ** (top - 127)))  # or its inverse may be infinite
            torch.mul(power, down, out=scale)
            factor = inverse(power, up, small)
            factor.masked_fill_(power == infinite, 1.0)  # what is infinite stays so
            target.copy_(torch.mul(values, factor.unsqueeze(-1), out=here))
    if lost is not None:
        torch.sub(x, widen(given, powers, block), out=lost)


def widen(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the numbers that `narrow` wrote, as a new (..., numel) float32.

    Rounding may have made a number larger than the largest float32: it is returned as that one. Only a block with an
    infinite scale had a non-finite number.
    """
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    rows, scales, target = as_rows(values), as_rows(scales).unsqueeze(-1), as_rows(out)
    eighth = rows.dtype == torch.float8_e4m3fn
    reaches_the_end = bool((scales >= _FAR).any())
    for cut in spans(rows, block):
        for coded, power, here in zip(cut.numbers(rows), cut.blocks(scales), cut.numbers(target), strict=True):
            here.copy_(_e4m3(coded) if eighth else coded)
            if reaches_the_end:  # one factor alone would be infinite, or the product may be
                here.mul_(2.0**8 if eighth else 1.0).mul_(power)
                here.copy_(torch.where(power.isfinite(), here.clamp(-_MOST, _MOST), here))
            else:
                here.mul_(power * 2.0**8 if eighth else power)
    return out


def bfloat16_losing(x: Tensor, out: Tensor, lost: Tensor) -> None:
    """Write x (..., numel) float32 to `out` (..., numel) bfloat16 and what is lost of it to `lost`, which may be x."""
    out.copy_(x)
    torch.sub(x, out.float(), out=lost)


def _e4m3(values: Tensor) -> Tensor:
    """float8_e4m3fn values / 2^8 as float16, its bits moved: ten times faster than converting; no NaN."""
    bits = values.view(torch.int8).to(torch.int16)
    bits <<= 7
    bits &= ~0x4000  # the sign went into two bits
    return bits.view(torch.float16)
