"""Int8: blocks of numbers in eight bits each, symmetric, one float32 scale per block.

Equations (per block b):
    s = max|x_b| / 127;   q = round(x_b / s)  or  floor(x_b / s + u), u ~ U[0, 1) with `stochastic`
    decoded = s q
Wire:    numel + 4 ceil(numel / block) bytes, padded to 4.   Error of a number: at most s / 2 (nearest), s (stochastic).
Paper:   Dettmers et al., arXiv 2110.02861 (block-wise); QSGD, arXiv 1610.02132 (stochastic rounding).
Traits:  nearest contracts: per block |x - C(x)|^2 <= block (s/2)^2 <= block / 254^2 |x|^2; stochastic is unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.exchange.codec._uniform import BlockInteger, check_block


@dataclass(frozen=True, slots=True)
class Int8(BlockInteger):
    """An 8-bit codec; `block_size` numbers share a scale."""

    block_size: int = 256
    stochastic: bool = False
    levels: ClassVar[int] = 127
    bits: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_block(self.block_size, multiple=4, typical=256)
