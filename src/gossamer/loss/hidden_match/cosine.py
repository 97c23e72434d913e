"""Cosine: the student's hidden state, mapped to the teacher's width, is to have the direction of the teacher's.

Equation: L = mean_i |W x_i / |W x_i| - y_i / |y_i||^2 = mean_i 2 - 2 cos(W x_i, y_i)
Symbols: x_i (D,), y_i (E,) the outputs of a block of the student and of the teacher at token i; W (E, D) learned.
S. Sun et al., Patient Knowledge Distillation for BERT Model Compression, EMNLP 2019, https://arxiv.org/abs/1908.09355,
equation 7. Unlike the paper: of all tokens and not of the first one, and of models of unequal widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear, normalize

from gossamer.loss.hidden_match import HiddenMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(HiddenMatch):
    """Squared distance of normalized hidden states."""

    def shapes(self, student: int, teacher: int) -> Mapping[str, tuple[int, ...]]:
        return {"map": (teacher, student)}

    def loss(self, student: Tensor, teacher: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
        gaps = normalize(linear(student, maps["map"]), dim=1) - normalize(teacher, dim=1)
        return gaps.square().sum() / max(len(gaps), 1)
