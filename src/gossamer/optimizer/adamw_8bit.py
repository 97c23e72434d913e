"""AdamW in 8 bits: the moments of large parameters in a code of 256 values, with one scale per block of a row.

Paper: Dettmers, Lewis, Shleifer, Zettlemoyer, ICLR 2022, arXiv:2110.02861; the rule is AdamW's.
Equations, for update t and some rows at a time:
    m, v <- decode(m'), decode(v')
    w, m, v <- AdamW(w, g, m, v, t)   in float32
    m', v' <- encode(m), encode(v)
    encode, per block b of 256 neighbors in a row:  s = max|x_b|, the nearest of 256 values to x / s
    (ops.dynamic_code)
Symbols: m' `mean_dynamic8` (values with both signs) and v' `square_dynamic8` (without), (rows, columns) in one byte
each, with their scales `mean_scale` and `square_scale`, (rows, ceil(columns / 256)) float32.
State:   2 + 8 / 256 = 2.03 bytes per element, 8 with AdamW; norms, biases, parameters of fewer than 4,096 elements or
with rows of fewer than 32 keep float32.
Work: AdamW's, and a search for every number; float32 moments exist for 2^17 elements at a time.
Good when: the states do not fit, or one pays for every byte.   Not for: half-type parameters alone (see Master).
Unlike the paper: blocks lie within rows, so that ranks can share a parameter and another number of them finds its
states bit for bit; a second moment is never rounded to zero, where AdamW would divide by eps alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.ops import dynamic_code
from gossamer.optimizer._adam import check
from gossamer.optimizer._small_states import SmallStates


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW8bit(SmallStates):
    """AdamW with 8-bit moments; `decay_1d`: whether vectors and scalars decay too."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_1d: bool = False
    code: ClassVar[str] = "dynamic8"
    block: ClassVar[int] = 256  # fixed, and in no slot's name: states in other blocks would be other states
    scales: ClassVar[tuple[str, ...]] = ("scale",)

    def __post_init__(self) -> None:
        check(self)

    def encode(self, x: Tensor, *, signed: bool) -> tuple[Tensor, ...]:
        return dynamic_code.encode(x, signed=signed)

    def decode(self, held: Sequence[Tensor], *, signed: bool) -> Tensor:
        codes, scale = held
        return dynamic_code.decode(codes, scale, signed=signed)
