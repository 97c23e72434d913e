"""LoRA-FA: LoRA with A frozen, so that a layer keeps A x for the backward pass and not x (Zhang et al. 2023,
https://arxiv.org/abs/2308.03303).

Saved per adapted linear layer and token, in elements: LoRA in + rank, LoRA-FA rank, a frozen layer alone 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gossamer.model.adapter import Adapter, AdapterTensor
from gossamer.model.adapter._checks import check_rank
from gossamer.model.adapter.lora import draw_lora, lora_config


@dataclass(frozen=True)
class LoraFa(Adapter):
    """LoRA-FA: y = W x + alpha / rank B A x, where B alone is trained.

    A starts with orthonormal rows. Then the gradient of B is that of the paper's projected update up to a constant: the
    weight moves by the part of its gradient that lies in the row space of A. There is no dropout: on the input it would
    keep the input for the backward pass again.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    takes_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rank(self.rank, 0.0)

    def config(self, paths: Sequence[str]) -> Any:
        return lora_config(paths, rank=self.rank, alpha=self.alpha, dropout=0.0)

    def draw(self, of: AdapterTensor) -> None:
        if of.slot != "lora_A":
            draw_lora(of)
            return
        torch.nn.init.orthogonal_(of.tensor)

    def is_trained(self, slot: str) -> bool:
        return slot != "lora_A"
