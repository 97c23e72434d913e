"""Cast: every number in a 16-bit floating-point type; what mixed precision does, for the wire alone.

Equations:
    bfloat16:  decoded = bf16(x), to nearest, ties to even
    float16:   s_b = 2^(floor(log2 max|x_b|) - 14);   decoded = s_b fp16(x / s_b), per block b of 1024
Symbols: bf16 has float32's exponents and 8 significant bits; fp16 11 significant bits, but exponents -14 to 15 alone.
Gradients of 1e-8 would vanish in plain fp16 and a large one become infinite: one power of two a block, which costs no
precision, makes its error relative everywhere, and that is what feedback needs.
Wire:    2 numel bytes, and 4 ceil(numel / 1024) with float16; each padded to 4.   Work: one pass, or three.
Error:   of a number at most 2^-8 |x| (bfloat16), 2^-11 |x| + 2^-39 max|x_b| (float16).
Paper:   Micikevicius et al., arXiv 1710.03740 (float16); Kalamkar et al., arXiv 1905.12322 (bfloat16).
Good when: nothing may be noticed.   Not for: links that need more than half of the bytes gone.
A float32 beyond the largest bfloat16 (3.39e38) becomes infinite, as float16 it stays finite; what is infinite stays so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.ops.blocks import empty_message, part
from gossamer.ops.fused import bfloat16_losing, narrow, widen
from gossamer.spec.errors import bad_input

_BLOCK = 1024  # numbers that share a power of two with float16


@dataclass(frozen=True, slots=True)
class Cast(Codec):
    """A codec to a 16-bit floating-point type, `dtype`: bfloat16 or float16."""

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise bad_input(wanted="bfloat16 or float16", got=repr(self.dtype), do="give bfloat16", key="dtype")

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(contraction=1 - 2.0 ** (-21 if self._scaled else -16))

    @property
    def block(self) -> int:
        return _BLOCK if self._scaled else 2

    def nbytes(self, numel: int) -> int:
        return self._head(numel) + -(-2 * numel // 4) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        numel = x.shape[-1]
        out = empty_message(x, self.nbytes(numel))
        scales, values = self._parts(out, numel)
        if self._scaled:
            narrow(x, _BLOCK, 14, scales, values)
        else:
            values.copy_(x)
        return out

    def encode_losing(self, x: Tensor, key: Key, lost: Tensor) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        scales, values = self._parts(out, x.shape[-1])
        if self._scaled:
            narrow(x, _BLOCK, 14, scales, values, lost)
        else:
            bfloat16_losing(x, values, lost)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, values = self._parts(message, numel)
        return widen(values, scales, _BLOCK) if self._scaled else values.float()

    @property
    def _scaled(self) -> bool:
        return self.dtype == "float16"

    def _head(self, numel: int) -> int:
        return 4 * -(-numel // _BLOCK) if self._scaled else 0

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head, kind = self._head(numel), torch.float16 if self._scaled else torch.bfloat16
        return part(message, 0, head // 4, torch.float32), part(message, head, numel, kind)
