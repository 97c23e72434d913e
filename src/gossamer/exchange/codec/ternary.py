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
from typing import ClassVar

from gossamer.exchange.codec import CodecTraits
from gossamer.exchange.codec._uniform import UniformQuantizer, check_block


@dataclass(frozen=True, slots=True)
class Ternary(UniformQuantizer):
    """A ternary codec, rounded at random; `block_size` numbers share a scale."""

    block_size: int = 128
    levels: ClassVar[int] = 1
    bits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_block(self.block_size, multiple=8, typical=128)

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(unbiased=True)

    @property
    def block(self) -> int:
        return self.block_size

    @property
    def rounds_at_random(self) -> bool:
        return True
