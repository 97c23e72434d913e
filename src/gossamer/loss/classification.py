"""Classification: mean cross entropy of one class per row.

Equation: loss = - (1/n) sum over b with labels[b] != -100 of log softmax(logits[b])[labels[b]]
Symbols: logits (B, C); labels (B,) of class numbers; n number of valid labels.
A model that returns its own loss is believed; otherwise the logits are read as float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.loss import IGNORE, Loss
from gossamer.loss.inputs.labels import labels_of, mean_cross_entropy
from gossamer.loss.inputs.model_output import logits_of, loss_of
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification(Loss):
    """A loss function for classification. `labels`: key of the labels in a batch, (B,) int64, -100 to ignore a row."""

    labels: str = "labels"

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        own = loss_of(output)
        if own is not None:
            return own
        return mean_cross_entropy(*self.predictions(output, batch))

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = logits_of(output, dims=2, shape="(batch, classes)")  # (B, C)
        labels = labels_of(batch, self.labels)
        if logits.shape[:1] != labels.shape:
            raise bad_input(
                wanted=f"one row of logits for each of the labels {tuple(labels.shape)}",
                got=f"logits {tuple(logits.shape)}",
                do="return one row of logits per input row",
                key="model",
            )
        return logits, labels

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (labels_of(batch, self.labels) != IGNORE).sum()
