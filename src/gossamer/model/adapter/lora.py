"""LoRA: y = W x + alpha / rank B A x, with W frozen (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from gossamer.model.adapter import Adapter, AdapterTensor, _peft
from gossamer.model.adapter._checks import check_rank


@dataclass(frozen=True)
class Lora(Adapter):
    """LoRA. A, (rank, in), starts uniform in +-1 / sqrt(in); B, (out, rank), starts at 0."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    takes_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rank(self.rank, self.dropout)

    def config(self, paths: Sequence[str]) -> Any:
        return lora_config(paths, rank=self.rank, alpha=self.alpha, dropout=self.dropout)

    def draw(self, of: AdapterTensor) -> None:
        draw_lora(of)


def lora_config(paths: Sequence[str], *, rank: int, alpha: float, dropout: float, **more: Any) -> Any:
    """Return peft's LoraConfig for the linear layers at `paths`."""
    return _peft.library().LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(paths), init_lora_weights=False, **more
    )


def draw_lora(of: AdapterTensor) -> None:
    """Set A or B to its initial values, as peft does."""
    if of.slot == "lora_A":
        nn.init.kaiming_uniform_(of.tensor, a=math.sqrt(5))
    else:
        nn.init.zeros_(of.tensor)
