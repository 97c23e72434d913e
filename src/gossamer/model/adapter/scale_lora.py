"""ScaleLoRA: the weights of a pruned layer times a product of two thin factors (PERP: Zimmer, Andoni, Spiegel and
Pokutta 2023, https://arxiv.org/abs/2312.15230).

    y = x V^T + b,   V = W * (B A)

W is frozen, and A and B start at 1 / sqrt(rank), so that V starts at W. A weight of 0 stays one, bit for bit, so there
is no mask. All rows of A start equal, and so do the columns of B: they get equal gradients and stay equal, so that B A
has rank 1 whatever `rank` is. It is kept as in the paper; with Adam, rank 1 at sqrt(rank) times the learning rate
trains the same with fewer numbers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from gossamer.model.adapter import Adapter, AdapterTensor
from gossamer.model.adapter._checks import check_rank
from gossamer.model.adapter.lora import lora_config


@dataclass(frozen=True)
class ScaleLora(Adapter):
    """ScaleLoRA. Weight decay would draw V to 0, and is refused."""

    rank: int = 16
    targets: tuple[str, ...] = ()
    keeps_masks: ClassVar[bool] = True
    is_scale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rank(self.rank, 0.0)

    def config(self, paths: Sequence[str]) -> Any:
        layer = importlib.import_module("gossamer.model.adapter._effective_weight")
        found = lora_config(paths, rank=self.rank, alpha=float(self.rank), dropout=0.0)
        found._register_custom_module({nn.Module: partial(layer.EffectiveLinear, change=layer.Scale())})
        return found

    def draw(self, of: AdapterTensor) -> None:
        nn.init.constant_(of.tensor, 1 / math.sqrt(self.rank))
