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

import torch
from torch import Tensor

from gossamer.compress.codec import Codec, Key, Traits
from gossamer.ops.blocks import empty_message, part
from gossamer.ops.quantise import dequantise, quantise
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """`block_numel` numbers share a scale."""

    block_numel: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.block_numel < 4 or self.block_numel % 4:
            raise bad_input(wanted="a multiple of 4", got=repr(self.block_numel), do="give 256, say", key="block_numel")

    @property
    def traits(self) -> Traits:
        worst = self.block_numel / (2 * 127) ** 2  # one large number, all others just below half a step
        nearest = 1 - worst if worst < 1 else None
        return Traits(unbiased=self.stochastic, contraction=None if self.stochastic else nearest)

    @property
    def block(self) -> int:
        return self.block_numel

    def nbytes(self, numel: int) -> int:
        blocks = -(-numel // self.block_numel)
        return 4 * blocks + -(-numel // 4) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        numel = x.shape[-1]
        out = empty_message(x, self.nbytes(numel))
        scales, levels = self._parts(out, numel)
        rng = key.generator(x.device) if self.stochastic else None
        quantise(x, self.block_numel, 127, scales, levels, rng)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, levels = self._parts(message, numel)
        return dequantise(levels, scales, self.block_numel)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        blocks = -(-numel // self.block_numel)
        return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, numel, torch.int8)
