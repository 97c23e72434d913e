"""Ternary: every number as -1, 0 or 1 times the largest of its block, drawn so that the mean is right (TernGrad).

Equations (per block b):
    s = max|x_b|;   decoded = s sign(x) B,   B ~ Bernoulli(|x| / s)
Wire:    4 ceil(numel / block) + ceil(numel / 4) bytes, padded to 4; four numbers a byte, the first in its lowest bits.
Error:   of a number less than s; E|x - C(x)|^2 <= (s |x|_1 - |x|^2) per block: as the blocks grow, so does the noise.
Paper:   Wen et al., arXiv 1705.07878.   Traits: unbiased; no contraction.
Good when: many ranks average the noise out.   Not for: feedback around it (the variance exceeds |x|^2).
Unlike the paper: a scale per block instead of per layer, and no clipping at 2.5 deviations, which would be a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.compress.codec import Codec, Key, Traits
from gossamer.ops.blocks import empty_message, part
from gossamer.ops.quantise import dequantise, quantise
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Ternary(Codec):
    """`block_numel` numbers share a scale."""

    block_numel: int = 128

    def __post_init__(self) -> None:
        if self.block_numel < 8 or self.block_numel % 8:
            raise bad_input(wanted="a multiple of 8", got=repr(self.block_numel), do="give 128, say", key="block_numel")

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True)

    @property
    def block(self) -> int:
        return self.block_numel

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block_numel) + -(-numel // 16) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        scales, codes = self._parts(out, x.shape[-1])
        quantise(x, self.block_numel, 1, scales, codes, key.generator(x.device), bits=2)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, codes = self._parts(message, numel)
        return dequantise(codes, scales, self.block_numel, bits=2, numel=numel)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        blocks = -(-numel // self.block_numel)
        return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, -(-numel // 4), torch.uint8)
