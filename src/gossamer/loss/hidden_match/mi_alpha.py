"""MiAlpha: the student's hidden state is to tell, of the tokens of its micro-batch, which one the teacher saw.

Equation: L = -I_a,    f(x, y) = (U n(x)) . (V n(y)) / sqrt(width)
Symbols: I_a the lower bound of the mutual information of `ops/mutual_information.py`, of pairs at the same token, apart
from the other tokens; x (D,), y (E,) the outputs of a block of the student and of the teacher; U (width, D) and
V (width, E) learned; n subtracts the mean of a vector and divides by its standard deviation. Below a = 1 the baseline
log q is learned, too. a = 1 is InfoNCE.
H. Zhang et al., Distiller, SustaiNLP 2021, https://arxiv.org/abs/2109.11105; the bound: B. Poole et al., ICML 2019.
Unlike the paper: the critic is this product, and q one number per pair of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import layer_norm, linear

from gossamer.loss.hidden_match import HiddenMatch
from gossamer.ops.mutual_information import interpolated_bound
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import from_0_to_1, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class MiAlpha(HiddenMatch):
    """A lower bound of mutual information, to be raised.

    alpha   from 0 (high variance, low bias) to 1 (InfoNCE: at most log `tokens`)
    width   of the space in which the two hidden states are compared
    tokens  of a micro-batch that are compared with each other, at most; drawn at random
    """

    alpha: float = 0.9
    width: int = 64
    tokens: int = 256

    def __post_init__(self) -> None:
        from_0_to_1("alpha", self.alpha)
        positive("width", self.width)
        if self.tokens < 2:
            do = "give at least 2: a pair needs another token beside it"
            raise bad_input(wanted="2 or more tokens", got=str(self.tokens), do=do, key="tokens")

    @property
    def most_tokens(self) -> int:
        return self.tokens

    def shapes(self, student: int, teacher: int) -> Mapping[str, tuple[int, ...]]:
        both = {"student": (self.width, student), "teacher": (self.width, teacher)}
        return both if self.alpha == 1 else {**both, "log_q": (1,)}

    def loss(self, student: Tensor, teacher: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
        ours, theirs = (
            linear(layer_norm(rows, rows.shape[1:]), maps[whose])
            for whose, rows in (("student", student), ("teacher", teacher))
        )
        if len(ours) < 2:  # no other token: nothing to learn, and every gradient is 0
            return (ours.sum() + theirs.sum() + sum(one.sum() for one in maps.values())) * 0.0
        scores = ours @ theirs.T / math.sqrt(self.width)
        return -interpolated_bound(scores, self.alpha, maps.get("log_q", 0.0))
