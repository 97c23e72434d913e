"""VeRA: two random matrices shared by all layers, and two trained vectors per layer (Kopiczko et al. 2023,
https://arxiv.org/abs/2310.11454).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gossamer.model.adapter import Adapter, AdapterTensor, _peft
from gossamer.model.adapter._checks import check_rank


@dataclass(frozen=True)
class Vera(Adapter):
    """VeRA: y = W x + b * B (d * A x), A and B frozen and the same in all layers; d starts at `d_initial`, b at 0.

    A and B follow from `projection_seed` alone, so that all stages draw the same ones.
    """

    rank: int = 256
    dropout: float = 0.0
    d_initial: float = 0.1
    projection_seed: int = 0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rank(self.rank, self.dropout)

    def config(self, paths: Sequence[str]) -> Any:
        with _peft.quiet():  # on what `projection_seed` is for
            return _peft.library().VeraConfig(
                r=self.rank,
                vera_dropout=self.dropout,
                d_initial=self.d_initial,
                projection_prng_key=self.projection_seed,
                save_projection=False,
                target_modules=list(paths),
            )

    def draw(self, of: AdapterTensor) -> None:
        nn.init.constant_(of.tensor, 0.0 if of.slot == "vera_lambda_b" else self.d_initial)
