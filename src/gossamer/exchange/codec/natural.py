"""Natural: every number to one of the two powers of two around it, drawn so that the mean is right.

Equations:
    x = +-2^e (1 + f), 0 <= f < 1;   decoded = +-2^(e + B),  B ~ Bernoulli(f)
Drawing is adding 23 random bits to those of the float: the carry out of f into e has probability f.
Wire:    numel + 4 ceil(numel / 1024) bytes, padded to 4: a sign, seven bits of exponent, a power of two per block of
1024 that the exponents are counted from (float32 has eight bits of them; no block needs more than seven).
Error:   E|x - C(x)|^2 <= |x|^2 / 8.   Work: 9 passes.
Paper:   Horvath et al., arXiv 1905.10988.   Traits: unbiased; contracts by 7/8 in the mean.
Good when: an unbiased method must bear any distribution.   Not for: Gaussian blocks (int8 is 30 times closer).
Unlike the paper: seven bits of exponent, not eight, so that one byte holds it all: what is 2^-126 of its block's
largest and less is drawn between that and zero. Blocks that reach 2^127 count as infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.ops.blocks import as_rows, empty_message, part, scratch, spans
from gossamer.ops.quantize import SMALLEST, largest
from gossamer.ops.rounding_noise import Noise

_BLOCK = 1024
_SIGN = -(2**31)
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF


@dataclass(frozen=True, slots=True)
class Natural(Codec):
    """A codec to powers of two, rounded at random. It has no parameters."""

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(unbiased=True, contraction=7 / 8)

    @property
    def block(self) -> int:
        return _BLOCK

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // _BLOCK) + -(-numel // 4) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        scales, codes = (as_rows(part) for part in _parts(out, x.shape[-1]))
        rows, room = as_rows(x), scratch(x, _BLOCK)
        noise = Noise(room.numel(), key.generator(x.device), x.device)
        for cut in spans(rows, _BLOCK):
            views = zip(cut.numbers(rows), cut.scratch(room), cut.blocks(scales), cut.numbers(codes), strict=True)
            for values, here, scale, target in views:
                target.copy_(_drawn(_scaled(values, here, scale).view(torch.int32), noise))
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        out = torch.empty((*message.shape[:-1], numel), dtype=torch.float32, device=message.device)
        scales, codes = (as_rows(part) for part in _parts(message, numel))
        rows = as_rows(out)
        for cut in spans(rows, _BLOCK):
            views = zip(cut.numbers(codes), cut.blocks(scales.unsqueeze(-1)), cut.numbers(rows), strict=True)
            for code, scale, target in views:
                _powers(code, scale, target)
        return out


def _parts(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    blocks = -(-numel // _BLOCK)
    return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, numel, torch.int8)


def _scaled(values: Tensor, room: Tensor, scale: Tensor) -> Tensor:
    """Divide by a power of two so that every magnitude is below one: their exponents then have seven bits."""
    top = largest(values)
    power = (top.view(torch.int32) & _EXPONENT).view(torch.float32)
    torch.mul(power, 2.0, out=scale)
    inverse = torch.where(top < SMALLEST, torch.zeros_like(top), 0.5 / power)
    return torch.mul(values, inverse.unsqueeze(-1), out=room)


def _drawn(bits: Tensor, noise: Noise) -> Tensor:
    """Bits of floats to a sign in bit 7 and an exponent in bits 0 to 6; `bits` is written over."""
    words = noise.words(bits.numel()).view(bits.shape)
    words &= _MANTISSA
    bits += words
    torch.bitwise_and(bits, _SIGN, out=words)
    bits <<= 1  # bit 30 is never set
    bits ^= words
    bits >>= 24
    return bits


def _powers(codes: Tensor, scale: Tensor, target: Tensor) -> None:
    bits = target.view(torch.int32)
    bits.copy_(codes)
    bits <<= 23
    bits &= ~0x40000000  # the sign went into two bits
    target.mul_(scale)
