"""COAT: AdamW whose moments are FP8 numbers, with a power per group that makes them fill the range of FP8.

Paper: Xi et al., ICLR 2025, arXiv:2410.19313, section 4; the rule is AdamW's.
Equations, for update t and some rows at a time:
    m, v <- decode(m'), decode(v')
    w, m, v <- AdamW(w, g, m, v, t)   in float32
    m', v' <- encode(m), encode(v)
    encode, per group of 128 neighbors in a row:  k, c, s by its range,  q = e4m3(sign(x) (|x| / c)^k / s)
    (ops.range_expansion)
Symbols: m' `mean_e4m3` and v' `square_e4m3`, (rows, columns) in one byte each, with s, k and c of their groups
(`mean_scale`, `mean_power`, `mean_middle` and those of `square`), (rows, ceil(columns / 128)) float32.
State:   2 + 24 / 128 = 2.19 bytes per element, 8 with AdamW; norms, biases, parameters of fewer than 4,096 elements or
with rows of fewer than 32 keep float32.
Work: AdamW's, and two powers per number each way; float32 moments exist for 2^17 elements at a time.
Good when: the numbers of a group are of like size, as second moments of a row are: the error is about 6 % / k.
Not for: half-type parameters alone (see Master); gains nothing over plain FP8 where k is 1.
Unlike the paper: groups lie within rows, so that ranks can share a parameter and another number of them finds its
states bit for bit; 1 <= k <= 16; a second moment is never rounded to zero, where AdamW would divide by eps alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.ops import range_expansion
from gossamer.optimizer._adam import check
from gossamer.optimizer._small_states import SmallStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Coat(SmallStates):
    """AdamW with FP8 moments; `decay_1d`: whether vectors and scalars decay too."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_1d: bool = False
    code: ClassVar[str] = "e4m3"
    block: ClassVar[int] = 128  # fixed, and in no slot's name: states in other groups would be other states
    scales: ClassVar[tuple[str, ...]] = ("scale", "power", "middle")

    def __post_init__(self) -> None:
        check(self)

    def encode(self, x: Tensor, *, signed: bool) -> tuple[Tensor, ...]:
        return range_expansion.encode(x, signed=signed)

    def decode(self, held: Sequence[Tensor], *, signed: bool) -> Tensor:
        codes, scale, power, middle = held
        return range_expansion.decode(codes, scale, power, middle)
