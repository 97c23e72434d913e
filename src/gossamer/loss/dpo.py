"""Dpo: direct preference optimization, from pairs of a better and a worse answer to the same prompt.

Equation: loss = - mean over pairs of log sigmoid(beta ((c - c0) - (r - r0)))
Symbols: c, r log-probabilities of the chosen and the rejected answer under the model; c0, r0 the same under the model
that the run began with.
R. Rafailov et al., Direct Preference Optimization: Your Language Model is Secretly a Reward Model, 2023,
https://arxiv.org/abs/2305.18290, equation 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from gossamer.loss import Loss
from gossamer.loss.inputs.answers import answer_log_probabilities
from gossamer.loss.inputs.labels import labels_of
from gossamer.spec.validate import positive

ANSWERS, REFERENCE = "loss.answers", "loss.reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo(Loss):
    """The loss of preference pairs (data.source pairs): rows 2 p and 2 p + 1 of a batch are one pair.

    beta   how strongly the model is held to the one that the run began with: larger is stronger

    A batch holds `loss.answers` (B, T) int64 and `loss.reference` (B,) float32, the log-probabilities under the initial
    model, which are computed once before step 1. Log-probabilities are sums over the tokens of an answer, in float32.
    """

    together: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = True
    by_token: ClassVar[bool] = True

    beta: float = 0.1

    def __post_init__(self) -> None:
        positive("beta", self.beta)

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        ratios = answer_log_probabilities(output, labels_of(batch, ANSWERS)) - labels_of(batch, REFERENCE)  # (B,)
        margins = ratios[0::2] - ratios[1::2]
        return -F.logsigmoid(self.beta * margins).mean()

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        answers = labels_of(batch, ANSWERS)
        return answers.new_tensor(answers.shape[0] // 2)
