"""MaskLoRA: LoRA whose product is added to the kept weights of a pruned layer alone (PERP: Zimmer, Andoni, Spiegel and
Pokutta 2023, https://arxiv.org/abs/2312.15230).

    y = x V^T + b,   V = W + alpha / rank (B A) * M

M: the mask of the pruning (1: kept), W frozen. Merging writes V in place: what was pruned stays 0, bit for bit, and a
pattern such as 2:4 stays one. For the backward pass a layer keeps x, A and B; V is made again.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn

from gossamer.model.adapter import Adapter, AdapterTensor
from gossamer.model.adapter._checks import check_rank
from gossamer.model.adapter._layer_masks import masks_of_start, masks_of_zeros
from gossamer.model.adapter.lora import draw_lora, lora_config
from gossamer.store.start_folder import StartFolder


@dataclass(frozen=True)
class MaskLora(Adapter):
    """MaskLoRA. A starts uniform in +-1 / sqrt(in), B at 0.

    mask: `start`, the masks of the start folder (`gossamer prune` writes them); `nonzero`, the weights that are not 0
    at the start, for a model that was pruned elsewhere: a weight that is 0 by chance counts as pruned there.
    """

    rank: int = 16
    alpha: float = 32.0
    mask: Literal["start", "nonzero"] = "start"
    targets: tuple[str, ...] = ()
    keeps_masks: ClassVar[bool] = True
    without_start: ClassVar[Mapping[str, Any]] = {"mask": "nonzero"}

    def __post_init__(self) -> None:
        check_rank(self.rank, 0.0)

    def config(self, paths: Sequence[str]) -> Any:
        layer = importlib.import_module("gossamer.model.adapter._effective_weight")
        found = lora_config(paths, rank=self.rank, alpha=self.alpha, dropout=0.0)
        change = layer.AddMasked(self.alpha / self.rank)
        found._register_custom_module({nn.Module: partial(layer.EffectiveLinear, change=change)})
        return found

    def draw(self, of: AdapterTensor) -> None:
        draw_lora(of)

    def place_masks(self, module: nn.Module, start: StartFolder | None, held: frozenset[str] | None) -> None:
        if self.mask == "nonzero":
            masks_of_zeros(module, held)
        else:
            masks_of_start(module, start, held)
