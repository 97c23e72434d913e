"""Conversion to narrower floating-point types, with a power of two per block so that nothing overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.ops.blocks import as_rows, scratch, spans
from gossamer.ops.quantize import SMALLEST, largest

_EXPONENT = 0x7F800000  # of a float32
_FAR = 2.0**112  # a scale beside which a number of 16 bits may leave float32
_MOST = torch.finfo(torch.float32).max


def narrow(x: Tensor, block: int, top: int, scales: Tensor, out: Tensor) -> None:
    """Divide x (..., numel) float32 by a power of two per block and write it to `out` (..., numel), in its type.

    The powers go to `scales` (..., ceil(numel / block)). The largest magnitude of a block is then at least 2^top and
    below 2^(top + 1), so bits are lost by rounding and by underflow only. A block with a non-finite number gets an
    infinite scale.
    """
    rows, room, scales, out = as_rows(x), scratch(x, block), as_rows(scales), as_rows(out)
    for span in spans(rows, block):
        values = span.numbers(rows)
        most = largest(values, span.scratch(room))
        power = (most.view(torch.int32) & _EXPONENT).view(torch.float32)  # infinite for NaN
        torch.mul(power, 2.0**-top, out=span.blocks(scales))
        inverse = torch.where(most < SMALLEST, torch.zeros_like(most), 2.0**top / power)
        inverse.masked_fill_(power.isinf(), 1.0)  # what is infinite stays so
        span.numbers(out).copy_(torch.mul(values, inverse.unsqueeze(-1), out=span.scratch(room)))


def widen(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the numbers that `narrow` wrote, as a new (..., numel) float32.

    Rounding may have made a number larger than the largest float32: it is returned as that one. Only a block with an
    infinite scale had a non-finite number.
    """
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    rows, scales, target = as_rows(values), as_rows(scales), as_rows(out)
    eighth = rows.dtype == torch.float8_e4m3fn
    reaches_the_end = bool((scales >= _FAR).any())
    for span in spans(rows, block):
        here, power = span.numbers(target), span.blocks(scales).unsqueeze(-1)
        here.copy_(_e4m3(span.numbers(rows)) if eighth else span.numbers(rows))
        if reaches_the_end:  # one factor alone would be infinite, or the product may be
            here.mul_(2.0**8 if eighth else 1.0).mul_(power)
            here.copy_(torch.where(power.isfinite(), here.clamp(-_MOST, _MOST), here))
        else:
            here.mul_(power * 2.0**8 if eighth else power)
    return out


def _e4m3(values: Tensor) -> Tensor:
    """float8_e4m3fn values / 2^8 as float16, its bits moved: ten times faster than converting; no NaN."""
    bits = values.view(torch.int8).to(torch.int16)
    bits <<= 7
    bits &= ~0x4000  # the sign went into two bits
    return bits.view(torch.float16)
