"""DoRA: LoRA on the direction of a weight, and its rows' norms trained apart (Liu et al. 2024,
https://arxiv.org/abs/2402.09353).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gossamer.model.adapter import Adapter, AdapterTensor
from gossamer.model.adapter._checks import check_rank
from gossamer.model.adapter.lora import draw_lora, lora_config


@dataclass(frozen=True)
class Dora(Adapter):
    """DoRA: y = m V x / |V|, V = W + alpha / rank B A, |V| by row and without a gradient; m starts at |W|."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rank(self.rank, self.dropout)

    def config(self, paths: Sequence[str]) -> Any:
        return lora_config(paths, rank=self.rank, alpha=self.alpha, dropout=self.dropout, use_dora=True)

    def draw(self, of: AdapterTensor) -> None:
        if of.slot == "lora_magnitude_vector":
            weight = of.layer.get_base_layer().weight
            is_transposed = bool(getattr(of.layer, "fan_in_fan_out", False))
            norm = torch.linalg.vector_norm(weight, dim=0 if is_transposed else 1)
            of.tensor.copy_(norm.to(of.tensor.dtype))
        else:
            draw_lora(of)
