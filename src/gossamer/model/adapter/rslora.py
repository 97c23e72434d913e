"""rsLoRA: LoRA with the factor alpha / sqrt(rank) (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gossamer.model.adapter import Adapter, AdapterTensor
from gossamer.model.adapter._checks import check_rank
from gossamer.model.adapter.lora import draw_lora, lora_config


@dataclass(frozen=True)
class Rslora(Adapter):
    """Rank-stabilized LoRA: y = W x + alpha / sqrt(rank) B A x. Its updates keep their size as the rank grows."""

    rank: int = 64
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    takes_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rank(self.rank, self.dropout)

    def config(self, paths: Sequence[str]) -> Any:
        return lora_config(paths, rank=self.rank, alpha=self.alpha, dropout=self.dropout, use_rslora=True)

    def draw(self, of: AdapterTensor) -> None:
        draw_lora(of)
