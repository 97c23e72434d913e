"""The loss of a batch's labels: what a distillation is without its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gossamer.loss import Loss
from gossamer.loss.classification import Classification
from gossamer.loss.inputs.labels import LABELS, labels_of
from gossamer.loss.next_token import NextToken


class LabelsLoss(Loss):
    """A loss that is that of the labels where its teacher is not there."""

    __slots__ = ()

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return labels_loss(batch)(output, batch)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return labels_loss(batch).weight(batch)

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return labels_loss(batch).predictions(output, batch)


def labels_loss(batch: Mapping[str, Tensor]) -> Loss:
    """Return the loss of a batch's labels: one per row, or one per token."""
    return Classification() if labels_of(batch, LABELS).ndim == 1 else NextToken()
