"""The log-probabilities of answers under a model."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gossamer.loss import IGNORE
from gossamer.loss.inputs.model_output import check_no_terms, token_logits


def answer_log_probabilities(output: Any, answers: Tensor) -> Tensor:
    """Return the sum of log p(token | those before it) over each answer, (B,) float32, with a graph.

    `output`: of the forward, with logits (B, T, V); `answers` (B, T): the tokens of the answers at their places, -100
    elsewhere, not shifted. Raises BadInput where the logits have another shape, and for a
    model with loss terms of its own.
    """
    check_no_terms(output)
    logits = token_logits(output, answers, "answers")
    shifted = F.pad(answers[:, 1:], (0, 1), value=IGNORE)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view(answers.shape).sum(1)
