"""bf16: the weights in bfloat16, 16 bits each, without blocks. Relative error at most 2^-9 per weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.model.quantized import Blocks, WeightFormat


@dataclass(frozen=True)
class Bf16(WeightFormat):
    """The format of weights in bfloat16."""

    def empty(self, rows: int, columns: int, device: torch.device | None = None) -> Blocks:
        return Blocks(torch.empty(rows, columns, dtype=torch.bfloat16, device=device), None)

    def encode(self, weight: Tensor) -> Blocks:
        return Blocks(weight.detach().to(torch.bfloat16, copy=True).contiguous(), None)

    def decode(self, blocks: Blocks, columns: int) -> Tensor:
        return blocks.codes
