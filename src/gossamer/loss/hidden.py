"""Hidden: beside the teacher's words, the hidden states of its blocks are to be found in those of the student.

Equation: loss = D + w mean_j M(x_j, y_j),    j over the pairs of blocks
or, with `emd`: loss = D + w sum_ij F_ij M(x_i, y_j),    F the optimal transport of costs M
Symbols: D the loss of `output`, M that of `by`, w `match_weight`; x_j, y_j the outputs of a block of the student and of
one of the teacher at the tokens with a valid label. Of m blocks of the student and n of the teacher, pair j of k is
with `skip` block ceil(j m / k) of the student and ceil(j n / k) of the teacher, from 1 on, with `last` m - k + j and
n - k + j. With `emd` every block is matched with every one; F (m, n) has rows of sum 1 / m and columns of sum 1 / n
(`ops/transport.py`), and no gradient goes through it.
H. Zhang et al., Distiller, SustaiNLP 2021, https://arxiv.org/abs/2109.11105; `emd`: J. Li et al., BERT-EMD, EMNLP 2020,
https://arxiv.org/abs/2010.06133. Unlike BERT-EMD: the weights of blocks stay equal (no cost attention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import Tensor

from gossamer.loss import Loss
from gossamer.loss.distillation import Distillation
from gossamer.loss.hidden_match import HiddenMatch
from gossamer.loss.hidden_match.mse import Mse
from gossamer.loss.kl import Kl
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import positive

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden(Loss):
    """An output distillation with a match of hidden states.

    output        the distillation of outputs, with its teacher: {kl: {teacher: FOLDER}}
    by            how two blocks are compared; its learned maps are trained with the student, and no part of the model
    layers        which blocks are compared: skip, evenly spread ones, last, or emd, all with all, each as much as the
                  earth mover's distance says; one set of maps then serves all pairs of equal widths
    pairs         how many blocks are compared; 0: all blocks of the student; emd: 0
    match_weight  multiplies the match

    mse and cosine are means over tokens, exact on any number of ranks and micro-batches. mi_alpha compares the tokens
    of one micro-batch with each other, and emd has a flow for each micro-batch: both depend on how a batch is divided.
    """

    output: Loss = field(default_factory=Kl)
    by: HiddenMatch = field(default_factory=Mse)
    layers: Literal["skip", "last", "emd"] = "skip"
    pairs: int = 0
    match_weight: float = 1.0

    def __post_init__(self) -> None:
        positive("match_weight", self.match_weight)
        if self.pairs < 0:
            do = "give how many, or 0 for all blocks of the student"
            raise bad_input(wanted="0 or more pairs of blocks", got=str(self.pairs), do=do, key="pairs")
        if self.pairs and self.layers == "emd":
            do = "leave pairs out, or take layers: skip"
            raise bad_input(
                wanted="pairs 0 with emd, which matches all blocks", got=str(self.pairs), do=do, key="pairs"
            )
        if not isinstance(self.output, Distillation) or self.output.is_adaptive or self.output.top_k:
            raise bad_input(
                wanted="a distillation whose teacher gives all its words, towards a target that does not follow the "
                "loss: kl, reverse_kl or jsd with top_k 0",
                got=_told(self.output),
                do="write output: {kl: {teacher: FOLDER}}",
                key="output",
            )

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return self.output(output, batch)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.output.weight(batch)

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.output.predictions(output, batch)

    def paired(self, student: Sequence[T], teacher: Sequence[T]) -> list[tuple[T, T]]:
        """Return the pairs of blocks, of models with these. Raises BadInput where one has too few."""
        if self.layers == "emd" and student and teacher:
            return [(one, other) for one in student for other in teacher]
        count, m, n = self.pairs or len(student), len(student), len(teacher)
        if not 0 < count <= min(m, n):
            raise bad_input(
                wanted=f"{max(count, 1)} or more blocks in student and teacher, one for each pair",
                got=f"{m} in the student and {n} in the teacher ({', '.join(map(str, teacher))})",
                do="set pairs to the smaller number, or take a deeper teacher",
                key="train.loss.hidden.pairs",
            )
        if self.layers == "last":
            return list(zip(student[m - count :], teacher[n - count :], strict=True))
        return [(student[-(-at * m // count) - 1], teacher[-(-at * n // count) - 1]) for at in range(1, count + 1)]


def distillation_in(loss: Loss) -> Distillation | None:
    """Return the distillation of outputs that a loss is or holds; None for a loss without a teacher."""
    found = loss.output if isinstance(loss, Hidden) else loss
    return found if isinstance(found, Distillation) else None


def _told(loss: Loss) -> str:
    name = type(loss).__module__.rpartition(".")[2]
    return f"{name} with top_k {loss.top_k}" if isinstance(loss, Distillation) and loss.top_k else name
