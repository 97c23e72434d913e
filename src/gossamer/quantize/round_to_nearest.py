"""Round to nearest: every weight becomes the nearest value of its group's grid; the baseline of all other quantizers.

    q = clip(round((w - m) / s), 0, 2^b - 1),   |w - (s q + m)| <= s / 2

with m and s of the group (`gossamer.model.quantized.packed`). It needs no text and one pass over the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.quantize import EncodedWeight, Quantizer


@dataclass(frozen=True)
class RoundToNearest(Quantizer):
    """Rounding to the nearest value."""

    bits: int = 4
    group: int = 64
    symmetric: bool = False

    def __post_init__(self) -> None:
        assert self.format  # raises BadInput for what the format lacks

    def encode(self, weight: Tensor, moments: Tensor | None) -> EncodedWeight:
        return EncodedWeight(blocks=self.format.encode(weight))
