"""Int16Dynamic: dynamic fixed point, integers of 16 bits that share one power of two per block.

Equations (per block b):
    E_b = ceil(log2 max|x_b|);   q = round(x / 2^(E_b - 15)), at most 2^15 - 1 in magnitude;   decoded = q 2^(E_b - 15)
Wire:    2 numel + 4 ceil(numel / block) bytes, padded to 4.
Error:   of a number at most 2^-16 of the next power of two above the largest of its block; the largest itself, where it
is a power of two, loses 2^-15 of itself.
Paper:   Das et al., ICLR 2018, arXiv:1802.00930.
Good when: half the bytes of float32 are few enough, and the error has to be far below that of any 8 bits; bf16 has the
same bytes and 8 bits of precision.   Not for: numbers of a block that differ by more than 2^15.
Unlike the paper: an exponent belongs to a block of a bucket; -2^15 is not used (see ops.fixed_point).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.exchange.codec._uniform import check_block
from gossamer.ops.blocks import as_rows, empty_message, part, scratch, spans
from gossamer.ops.quantize import SMALLEST, largest

_TOP = 2**15 - 1


@dataclass(frozen=True, slots=True)
class Int16Dynamic(Codec):
    """A 16-bit fixed-point codec; `block_size` numbers share an exponent."""

    block_size: int = 4096

    def __post_init__(self) -> None:
        check_block(self.block_size, multiple=4, typical=4096)

    @property
    def traits(self) -> CodecTraits:
        # Each error is at most 2^-15 of half the power of two above the largest number, which is below that number.
        worst = self.block_size * 2.0**-30
        return CodecTraits(contraction=1 - worst if worst < 1 else None)

    @property
    def block(self) -> int:
        return self.block_size

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block_size) + -(-2 * numel // 4) * 4

    def encode(self, x: Tensor, key: Key) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        scales, integers = (as_rows(one) for one in self._parts(out, x.shape[-1]))
        rows, room = as_rows(x), scratch(x, self.block_size)
        for cut in spans(rows, self.block_size):
            views = zip(cut.numbers(rows), cut.scratch(room), cut.blocks(scales), cut.numbers(integers), strict=True)
            for values, here, scale, target in views:
                most = largest(values)
                fraction, exponent = torch.frexp(most)
                exponent = exponent - (fraction == 0.5).int() - 15
                step = torch.ldexp(torch.ones_like(most), exponent)
                small = most < SMALLEST
                scale.copy_(torch.where(most.isfinite(), torch.where(small, 0.0, step), torch.inf))
                # The inverse of the least steps is no float32: that of a part of the step, and then of the rest, are.
                half = exponent.div(2, rounding_mode="floor")
                is_sent = ~small & most.isfinite()
                first, rest = (torch.ldexp(is_sent.float(), -one).unsqueeze(-1) for one in (half, exponent - half))
                torch.mul(values, first, out=here).mul_(rest)
                target.copy_(here.round_().clamp_(-_TOP, _TOP).nan_to_num_(nan=1.0))
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, integers = self._parts(message, numel)
        out = torch.empty(integers.shape, dtype=torch.float32, device=message.device)
        rows, scales, target = as_rows(integers), as_rows(scales).unsqueeze(-1), as_rows(out)
        for cut in spans(rows, self.block_size):
            for q, scale, here in zip(cut.numbers(rows), cut.blocks(scales), cut.numbers(target), strict=True):
                torch.mul(q, scale, out=here)  # 0 times infinity is not finite either
        return out

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        blocks = -(-numel // self.block_size)
        return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, numel, torch.int16)
