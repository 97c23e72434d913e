"""ExpertDistillation: beside the labels, each expert is to return what it did before the model was pruned.

Equation: loss = CE + w D,    D = sum_layers sum_experts mean (E_teacher(x) - E_student(x))^2
Symbols: CE the mean cross-entropy of the labels, or the model's own loss; w `expert_weight`; x what the student's
router sends to an expert in one micro-batch, E the output of an expert before the router's weight.
Y. Xie et al., MoE-Pruner, 2024, https://arxiv.org/abs/2410.12013, section 3. Unlike the paper: w is given; the log says
which one makes both terms equal on the first rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.loss.distillation.labels_loss import LabelsLoss
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDistillation(LabelsLoss):
    """The loss of the labels, and how far the experts are from those of the model that was pruned.

    teacher        that model: the folder of a run or of a Hugging Face model, a GGUF file, or tcp://HOST:PORT of
                   `gossamer teach`
    expert_weight  multiplies the distance of the experts

    An expert's mean is over the tokens of one micro-batch, of padding too: it depends on how a batch is divided. The
    optimizer static_mask with masks: start holds the zeros of the pruned model.
    """

    teacher: str = ""
    expert_weight: float = 1.0

    def __post_init__(self) -> None:
        address_of(self.teacher)
        positive("expert_weight", self.expert_weight)
