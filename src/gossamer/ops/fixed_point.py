"""Dynamic fixed point: integers of up to 16 bits with one exponent for a whole tensor.

Equations (bits b, tensor x):
    E = ceil(log2 max|x|);   q = round(x / 2^(E - b + 1)), at most 2^(b - 1) - 1 in magnitude;   value = q 2^(E - b + 1)
    product: integers are multiplied and added in int32, `chain` products at a time, and these sums in float32
    sum:     the integers with the smaller exponent are shifted right first, rounding to nearest
    narrow:  int32 is shifted right until its largest magnitude has b - 1 bits; the exponent grows by the shift
Paper: Das et al., Mixed precision training of CNNs using integer operations, ICLR 2018, arXiv:1802.00930.
Unlike the paper: -2^(b - 1) is not used, as two products of it with itself are more than an int32 holds; and sums of
more than `chain` products go to float32, as sums of 1,024 products of normal 16-bit numbers already overflow.
An emulation: what it says of accuracy holds, and torch has no fast product of 16-bit integers to be quick with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 31  # bits of an int32 without its sign


@dataclass(frozen=True, slots=True, eq=False)
class FixedPoint:
    """A tensor of integers `q` times 2^`exponent`."""

    q: Tensor
    exponent: int

    @property
    def numbers(self) -> Tensor:
        """Return the numbers as float32."""
        return (self.q.double() * 2.0**self.exponent).float()


def fixed(x: Tensor, bits: int = 16) -> FixedPoint:
    """Return finite numbers as integers of so many bits; zeros have the exponent of 1."""
    exponent = _exponent(float(x.abs().max()) if x.numel() else 0.0) - bits + 1
    most = 2 ** (bits - 1) - 1
    return FixedPoint((x.double() * 2.0**-exponent).round().clamp(-most, most).to(torch.int16), exponent)


def chain(bits: int) -> int:
    """Return how many products of two integers of so many bits an int32 can add whatever they are."""
    return 1 << (_WORD - 2 * (bits - 1))


def product(a: FixedPoint, b: FixedPoint, bits: int) -> Tensor:
    """Return the matrix product (m, k) by (k, n) of integers of at most `bits` bits, (m, n) float32."""
    total = torch.zeros(a.q.shape[0], b.q.shape[1])
    for start in range(0, a.q.shape[1], chain(bits)):
        stop = start + chain(bits)
        total += a.q[:, start:stop].int() @ b.q[start:stop].int()
    return total * 2.0 ** (a.exponent + b.exponent)


def added(a: FixedPoint, b: FixedPoint) -> FixedPoint:
    """Return the sum as int32."""
    if a.exponent < b.exponent:
        a, b = b, a
    return FixedPoint(a.q.int() + _shifted(b.q.int(), a.exponent - b.exponent), a.exponent)


def narrowed(wide: FixedPoint, bits: int = 16) -> FixedPoint:
    """Return int32 as integers of so many bits."""
    most = int(wide.q.long().abs().max()) if wide.q.numel() else 0
    shift = max(0, most.bit_length() - (bits - 1))
    limit = 2 ** (bits - 1) - 1
    return FixedPoint(_shifted(wide.q, shift).clamp(-limit, limit).to(torch.int16), wide.exponent + shift)


def _exponent(most: float) -> int:
    """Return ceil(log2 most), exactly; 0 for zero."""
    fraction, exponent = math.frexp(most)
    return exponent - (fraction == 0.5)


def _shifted(q: Tensor, bits: int) -> Tensor:
    if not bits:
        return q
    if bits > _WORD:
        return torch.zeros_like(q)
    return ((q.long() + (1 << (bits - 1))) >> bits).to(q.dtype)
