"""Fp8: every number in an 8-bit floating-point type, with one power of two per block.

Equations (per block b):
    s_b = 2^(floor(log2 max|x_b|) - t);   decoded = s_b fp8(x / s_b), to nearest, ties to even
Symbols: t 7 for e4m3 (4 significant bits, exponents -6 to 8), 14 for e5m2 (3 significant bits, exponents -14 to 15).
Wire:    numel + 4 ceil(numel / block) bytes, padded to 4; the numbers in torch's float8_e4m3fn or float8_e5m2.
Error:   of a number at most 2^-4 |x| + 2^-17 max|x_b| (e4m3), 2^-3 |x| + 2^-31 max|x_b| (e5m2).
A finite number stays finite: above the last step below 2^128 it becomes the largest float32.
Paper:   Micikevicius et al., arXiv 2209.05433.
Good when: numbers of a block differ widely (activations, heavy tails).   Not for: those that do not: int8 is closer.
Unlike the paper: the scale is a power of two and belongs to a block, so scaling itself loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.ops.blocks import empty_message, part
from gossamer.ops.low_precision import narrow, widen
from gossamer.spec.errors import bad_input

_TOP = {"e4m3": 7, "e5m2": 14}  # exponent that a block's largest number gets
_TYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_RELATIVE = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
_ABSOLUTE = {"e4m3": 2.0**-17, "e5m2": 2.0**-31}  # of the block's largest magnitude


@dataclass(frozen=True, slots=True)
class Fp8(Codec):
    """A codec to 8-bit floating point. `format` is e4m3 or e5m2; `block_size` numbers share a scale."""

    format: str = "e4m3"
    block_size: int = 256

    def __post_init__(self) -> None:
        if self.format not in _TOP:
            raise bad_input(wanted="e4m3 or e5m2", got=repr(self.format), do="give e4m3", key="format")
        if self.block_size < 4 or self.block_size % 4:
            raise bad_input(wanted="a multiple of 4", got=repr(self.block_size), do="give 256, say", key="block_size")

    @property
    def traits(self) -> CodecTraits:
        worst = _RELATIVE[self.format] ** 2 + self.block_size * _ABSOLUTE[self.format] ** 2
        return CodecTraits(contraction=1 - worst if worst < 1 else None)

    @property
    def block(self) -> int:
        return self.block_size

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block_size) + -(-numel // 4) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        scales, values = self._parts(out, x.shape[-1])
        narrow(x, self.block_size, _TOP[self.format], scales, values)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, values = self._parts(message, numel)
        return widen(values, scales, self.block_size)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        blocks = -(-numel // self.block_size)
        return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, numel, _TYPE[self.format])
