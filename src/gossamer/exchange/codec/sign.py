"""Sign: one bit a number and the mean magnitude of each block.

Equations (per block b of d numbers):
    s = |x_b|_1 / d;   decoded = s where x >= 0, -s elsewhere
Wire:    4 ceil(numel / block) + ceil(numel / 8) bytes, padded to 4; eight numbers a byte, the first in its lowest bit.
Error:   |x - C(x)|^2 = |x|^2 - |x|_1^2 / d per block.
Paper:   Karimireddy et al., arXiv 1901.09847; 1-bit Adam, arXiv 2102.02888 (with sign(0) = 1, as here).
Traits:  contracts by |x|_1^2 / (d |x|^2), 0.64 for Gaussian blocks; for every x that is 1 / d. The scale in the code
of 1-bit Adam, |x|_2 / sqrt(d), does not contract at all.
Good when: there is feedback, and the link is the bottleneck.   Not for: use without feedback: it does not converge.
Unlike the papers: a scale per block, not per tensor, so that layers do not share one; 1024 cost 3% of the bytes. A
block of magnitudes that sum to more than float32 holds counts as infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.ops.blocks import empty_message, part
from gossamer.ops.fused import add_dequantized, dequantize, encode_signs
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Sign(Codec):
    """A 1-bit codec; `block_size` numbers share a scale."""

    block_size: int = 1024

    def __post_init__(self) -> None:
        if self.block_size < 8 or self.block_size % 8:
            raise bad_input(wanted="a multiple of 8", got=repr(self.block_size), do="give 1024, say", key="block_size")

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(contraction=1 / self.block_size)

    @property
    def block(self) -> int:
        return self.block_size

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block_size) + -(-numel // 32) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        return self._encoded(x, None)

    def encode_losing(self, x: Tensor, key: Key, lost: Tensor) -> Tensor:
        return self._encoded(x, lost)

    def _encoded(self, x: Tensor, lost: Tensor | None) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        encode_signs(x, *self._parts(out, x.shape[-1]), self.block_size, lost)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, codes = self._parts(message, numel)
        return dequantize(codes, scales, self.block_size, bits=1, numel=numel)

    def add(self, total: Tensor, message: Tensor, share: float, key: Key) -> None:
        scales, codes = self._parts(message, total.numel())
        add_dequantized(total, codes, scales * share, self.block_size, bits=1)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        blocks = -(-numel // self.block_size)
        return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, -(-numel // 8), torch.uint8)
