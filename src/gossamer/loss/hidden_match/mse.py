"""Mse: the student's hidden state, mapped to the teacher's width, is to be the teacher's.

Equation: L = mean_i |W x_i - y_i|^2 / E
Symbols: x_i (D,), y_i (E,) the outputs of a block of the student and of the teacher at token i; W (E, D) learned.
A. Romero et al., FitNets: Hints for Thin Deep Nets, ICLR 2015, https://arxiv.org/abs/1412.6550, with a linear map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from gossamer.loss.hidden_match import HiddenMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mse(HiddenMatch):
    """Mean squared error of hidden states."""

    def shapes(self, student: int, teacher: int) -> Mapping[str, tuple[int, ...]]:
        return {"map": (teacher, student)}

    def loss(self, student: Tensor, teacher: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
        gaps = linear(student, maps["map"]) - teacher
        return gaps.square().mean(1).sum() / max(len(gaps), 1)
