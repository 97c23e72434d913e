"""NextToken: mean cross entropy of every next token, given those before it.

Equation: loss = - (1/n) sum over (b, t) with labels[b, t+1] != -100 of log softmax(logits[b, t])[labels[b, t+1]]
Symbols: logits (B, T, V); labels (B, T), aligned with the input, not shifted; n number of valid labels after the shift.
A model that returns its own loss is believed (transformers' causal models return this very mean, some with terms of
their own added); otherwise the logits are shifted here, and read as float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from gossamer.loss import IGNORE, Loss
from gossamer.loss.inputs.labels import labels_of, mean_cross_entropy
from gossamer.loss.inputs.model_output import loss_of, token_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken(Loss):
    """Next-token cross-entropy in nats, the mean over valid labels; the model's own loss where it returns one.

    labels   key of the labels in a batch, (B, T) int64, aligned with the inputs (they are shifted here); -100 marks one
             to ignore
    """

    by_token: ClassVar[bool] = True

    labels: str = "labels"

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        own = loss_of(output)
        if own is not None:
            return own
        logits, shifted = self.predictions(output, batch)
        return mean_cross_entropy(logits.flatten(0, 1), shifted.flatten())

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = self.labels_in(batch)
        return self.logits_in(output, batch), F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # they move: logits are larger

    def labels_in(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the labels of a batch, (B, T) int64. Raises BadInput without any."""
        return labels_of(batch, self.labels)

    def logits_in(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of an output, (B, T, V). Raises BadInput where there is none for each label."""
        return token_logits(output, self.labels_in(batch), "labels")

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (self.labels_in(batch)[:, 1:] != IGNORE).sum()
