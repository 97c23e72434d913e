"""Jsd: the generalized Jensen-Shannon divergence, between the forward and the reverse one.

Equation: D = beta KL(p || m) + (1 - beta) KL(q || m),    m = beta p + (1 - beta) q
Symbols: p, q distributions of teacher and student; 0 < beta < 1. D / beta tends to KL(p || q) as beta tends to 0, and
D / (1 - beta) to KL(q || p) as beta tends to 1.
R. Agarwal et al., On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes (GKD), ICLR 2024,
https://arxiv.org/abs/2306.13649, equation 1. Unlike the paper: on the tokens of the data, not on samples of the
student.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.loss.distillation import Distillation
from gossamer.loss.kl import mean_gap
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsd(Distillation):
    """Generalized Jensen-Shannon divergence to a teacher.

    beta  weight of the teacher in the mixture

    The other settings are those of `kl`.
    """

    teacher: str = ""
    temperature: float = 1.0
    label_weight: float = 0.0
    tile_tokens: int = 256
    top_k: int = 0
    teacher_ranks: tuple[int, ...] = ()
    beta: float = 0.5

    def __post_init__(self) -> None:
        self.check()
        if not 0.0 < self.beta < 1.0:
            do = "give one, or choose kl or reverse_kl, which are its limits"
            raise bad_input(wanted="a number between 0 and 1", got=str(self.beta), do=do, key="beta")

    def divergence(self, student: Tensor, teacher: Tensor, t: float) -> Tensor:
        p, q = teacher.log_softmax(-1), student.log_softmax(-1)
        nobodys = p.isneginf() & q.isneginf()  # logaddexp has no gradient where both are infinite
        m = torch.logaddexp(
            p.masked_fill(nobodys, 0.0) + math.log(self.beta), q.masked_fill(nobodys, 0.0) + math.log1p(-self.beta)
        )
        return self.beta * mean_gap(p, m) + (1 - self.beta) * mean_gap(q, m)
