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

import torch
from torch import Tensor

from gossamer.compress.codec import Codec, Key, Traits
from gossamer.ops.blocks import empty_message, part
from gossamer.ops.quantise import dequantise, quantise
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Int4(Codec):
    """`block_numel` numbers share a scale."""

    block_numel: int = 128
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.block_numel < 8 or self.block_numel % 8:
            raise bad_input(wanted="a multiple of 8", got=repr(self.block_numel), do="give 128, say", key="block_numel")

    @property
    def traits(self) -> Traits:
        worst = self.block_numel / (2 * 7) ** 2  # one large number, all others just below half a step
        nearest = 1 - worst if worst < 1 else None
        return Traits(unbiased=self.stochastic, contraction=None if self.stochastic else nearest)

    @property
    def block(self) -> int:
        return self.block_numel

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block_numel) + -(-numel // 8) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        scales, codes = self._parts(out, x.shape[-1])
        rng = key.generator(x.device) if self.stochastic else None
        quantise(x, self.block_numel, 7, scales, codes, rng, bits=4)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, codes = self._parts(message, numel)
        return dequantise(codes, scales, self.block_numel, bits=4, numel=numel)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        blocks = -(-numel // self.block_numel)
        return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, -(-numel // 2), torch.uint8)
