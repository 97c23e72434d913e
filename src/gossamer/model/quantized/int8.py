"""int8: 8 bits per weight in blocks of 64 with one float16 scale, 8.25 bits per weight.

    s = max |w| / 127,   q = clip(round(w / s), -127, 127),   w' = s q,   |w - w'| <= s / 2 (1 + 2^-4)

over the 64 weights w of a block within a row; s is rounded to float16 before q is computed.
As in Dettmers et al. 2021, 8-bit optimizers via block-wise quantization, arxiv.org/abs/2110.02861, with linear codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.model.quantized import Blocks, WeightFormat
from gossamer.model.quantized._rows import BLOCK, count, in_blocks

_TOP = 127


@dataclass(frozen=True)
class Int8(WeightFormat):
    """The format of signed bytes with an absmax scale per block of 64."""

    def empty(self, rows: int, columns: int, device: torch.device | None = None) -> Blocks:
        blocks = count(columns)
        codes = torch.empty(rows, blocks * BLOCK, dtype=torch.int8, device=device)
        return Blocks(codes, torch.empty(rows, blocks, dtype=torch.float16, device=device))

    def encode(self, weight: Tensor) -> Blocks:
        wide = in_blocks(weight)
        scales = (wide.abs().amax(-1) / _TOP).half()
        steps = scales.float().unsqueeze(-1)
        codes = torch.where(steps > 0, wide / steps, 0).round_().clamp_(-_TOP, _TOP).to(torch.int8)
        return Blocks(codes.flatten(1), scales)

    def decode(self, blocks: Blocks, columns: int) -> Tensor:
        assert blocks.scales is not None
        wide = blocks.codes.view(*blocks.scales.shape, BLOCK).float()
        return wide.mul_(blocks.scales.float().unsqueeze(-1)).flatten(1)[:, :columns]
