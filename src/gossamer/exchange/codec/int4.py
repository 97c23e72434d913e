"""Int4: blocks of numbers in four bits each, symmetric, seven levels to either side, one float32 scale per block.

Equations (per block b):
    s = max|x_b| / 7;   q = round(x_b / s)  or  floor(x_b / s + u), u ~ U[0, 1) with `stochastic`
    decoded = s q
Wire:    4 ceil(numel / block) + ceil(numel / 2) bytes, padded to 4; two numbers a byte, the first in its low half.
Error:   of a number at most s / 2 (nearest), s (stochastic).
Paper:   SDP4Bit, arXiv 2410.15526: seven levels, not eight (using all sixteen codes converges worse), blocks of 128.
Traits:  nearest contracts: per block |x - C(x)|^2 <= block (s/2)^2 <= block / 14^2 |x|^2; stochastic is unbiased.
Good when: under `hadamard`, or with feedback.   Not for: blocks with one huge number, where the rest rounds to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.exchange.codec._uniform import BlockInteger, check_block


@dataclass(frozen=True, slots=True)
class Int4(BlockInteger):
    """A 4-bit codec; `block_size` numbers share a scale."""

    block_size: int = 128
    stochastic: bool = False
    levels: ClassVar[int] = 7
    bits: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_block(self.block_size, multiple=8, typical=128)
