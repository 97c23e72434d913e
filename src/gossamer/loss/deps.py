"""DepS: cross entropy of the whole network, and distillation from it into the subnets of a step.

Paper: Annavajjala et al., DepS: Delayed epsilon-Shrinking for Faster Once-For-All Training, ECCV 2024,
    arXiv:2407.06167.
Equations, for logits z_0 of the largest subnet and z_k of the K others of a step:
    L = CE(softmax z_0, y) + sum_k w_k KL(softmax sg(z_0) || softmax z_k) / K,   means over the rows
with w_k the weight that the supernet gives to subnet k: its learning rate in units of the largest one's (in-place
distillation: z_0 is the teacher, without a gradient). In evaluation, where there is one network, it is classification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.loss import IGNORE, Loss
from gossamer.loss.classification import Classification
from gossamer.loss.inputs.labels import labels_of, mean_cross_entropy
from gossamer.loss.kl import mean_gap

SUBNETS, WEIGHTS = "subnet_logits", "subnet_weights"  # keys of a supernet's output beside "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps(Loss):
    """The loss of a supernet. `labels`: key of the labels in a batch, (B,) int64, -100 to ignore a row."""

    labels: str = "labels"
    needs_subnets: ClassVar[bool] = True

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if not (isinstance(output, Mapping) and SUBNETS in output):
            return Classification(labels=self.labels)(output, batch)
        logits, labels = self.predictions(output, batch)
        total = mean_cross_entropy(logits, labels)
        subnets, weights = output[SUBNETS], output[WEIGHTS]  # (K, B, C), (K,)
        if not len(subnets):
            return total
        valid = labels != IGNORE
        teacher = logits.detach().float().log_softmax(-1)[valid]
        students = subnets.float().log_softmax(-1)[:, valid]
        apart = mean_gap(teacher.expand_as(students), students)  # (K, rows)
        means = apart.sum(1) / valid.sum().clamp(min=1)
        return total + torch.dot(weights.to(means.dtype), means) / len(subnets)

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return Classification(labels=self.labels).predictions(output, batch)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (labels_of(batch, self.labels) != IGNORE).sum()
