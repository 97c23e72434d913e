"""ReverseKl: the divergence of the teacher from the student, which keeps to the words that the teacher finds likely.

Equation: D = KL(q || p) = sum_v q_v (log q_v - log p_v),    p = softmax(z / T),    q = softmax(s / T)
Symbols: z, s logits of teacher and student, T temperature.
Y. Gu et al., MiniLLM: Knowledge Distillation of Large Language Models, ICLR 2024, https://arxiv.org/abs/2306.08543.
Unlike the paper: on the tokens of the data, not on samples of the student.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.loss.distillation import Distillation
from gossamer.loss.kl import forward_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class ReverseKl(Distillation):
    """Reverse KL divergence to a teacher. The settings are those of `kl`."""

    teacher: str = ""
    temperature: float = 1.0
    label_weight: float = 0.0
    tile_tokens: int = 256
    top_k: int = 0
    teacher_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.check()

    def divergence(self, student: Tensor, teacher: Tensor, t: float) -> Tensor:
        return forward_kl(student, teacher)
