"""Kl: the divergence of the student from the teacher, which wants every word that the teacher finds likely.

Equation: D = KL(p || q) = sum_v p_v (log p_v - log q_v),    p = softmax(z / T),    q = softmax(s / T)
Symbols: z, s logits of teacher and student, T temperature. Gradient: dD / d(s / T) = q - p.
G. Hinton et al., Distilling the Knowledge in a Neural Network, 2015, https://arxiv.org/abs/1503.02531.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.loss.distillation import Distillation


@dataclass(frozen=True, slots=True, kw_only=True)
class Kl(Distillation):
    """Forward KL divergence to a teacher.

    teacher       the folder of a run or of a Hugging Face model, or a GGUF file; or tcp://HOST:PORT, where
                  `gossamer teach` serves one: the ranks send it their tokens while they compute
    temperature   divides both logits before the softmax
    label_weight  weight of the labels' own loss, from 0 to 1; 1 - label_weight is that of the teacher
    tile_tokens   tokens whose logits over all words are held at a time, those of student and teacher
    top_k         0: the teacher runs beside the student. Above: before step 1 it runs once over the training data, its
                  most probable words are kept in a file and in memory, 8 top_k + 4 bytes a token, and it is freed; all
                  other words count as one. A teacher at tcp://HOST:PORT sends these words at every step, and nothing
                  is kept; with 0 it sends hidden states, to which the student's rank applies its head
    teacher_ranks ranks that hold the teacher; empty: all that compute the loss. Others get the words of top_k from
                  them: a teacher may be on the hosts alone that have its folder, and memory for it
    """

    teacher: str = ""
    temperature: float = 1.0
    label_weight: float = 0.0
    tile_tokens: int = 256
    top_k: int = 0
    teacher_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.check()

    def divergence(self, student: Tensor, teacher: Tensor, t: float) -> Tensor:
        return forward_kl(teacher, student)


def forward_kl(target: Tensor, of: Tensor) -> Tensor:
    """Return KL(softmax(target) || softmax(of)) of each row; infinite where `of` rules out a word of the target."""
    return mean_gap(target.log_softmax(-1), of.log_softmax(-1))


def mean_gap(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_v exp(p_v) (p_v - q_v) of rows of log-probabilities (n, C).

    A word that p rules out (-inf, as models mask padded words) adds 0, and not 0 times infinity.
    """
    return (p.exp() * (p - q).masked_fill(p.isneginf(), 0.0)).sum(-1)
