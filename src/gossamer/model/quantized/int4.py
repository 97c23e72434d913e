"""int4: 4 bits per weight in blocks of 64 with a float16 scale and a float16 minimum, 4.5 bits per weight.

    m = min w,   s = (max w - m) / 15,   q = clip(round((w - m) / s), 0, 15),   w' = s q + m

over the 64 weights w of a block within a row; m and s are rounded to float16 before q is computed. Two codes share a
byte: the first 32 weights of a block are the low halves, the others the high halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.model.quantized import Blocks, WeightFormat
from gossamer.model.quantized._rows import BLOCK, count, in_blocks

_TOP, _HALF = 15, BLOCK // 2


@dataclass(frozen=True)
class Int4(WeightFormat):
    """The format of 4-bit codes between the smallest and the largest weight of a block of 64."""

    def empty(self, rows: int, columns: int, device: torch.device | None = None) -> Blocks:
        blocks = count(columns)
        codes = torch.empty(rows, blocks * _HALF, dtype=torch.uint8, device=device)
        return Blocks(codes, torch.empty(rows, blocks, 2, dtype=torch.float16, device=device))

    def encode(self, weight: Tensor) -> Blocks:
        wide = in_blocks(weight)
        least = wide.amin(-1).half()
        steps = ((wide.amax(-1) - least.float()) / _TOP).half()
        above = wide - least.float().unsqueeze(-1)
        step = steps.float().unsqueeze(-1)
        codes = torch.where(step > 0, above / step, 0).round_().clamp_(0, _TOP).to(torch.uint8)
        packed = codes[..., :_HALF] | (codes[..., _HALF:] << 4)
        return Blocks(packed.flatten(1), torch.stack((steps, least), -1))

    def decode(self, blocks: Blocks, columns: int) -> Tensor:
        assert blocks.scales is not None
        packed = blocks.codes.view(*blocks.scales.shape[:2], _HALF)
        wide = torch.cat((packed & _TOP, packed >> 4), -1).float()
        step, least = blocks.scales.float().unsqueeze(-1).unbind(-2)
        return wide.mul_(step).add_(least).flatten(1)[:, :columns]
