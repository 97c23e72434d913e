"""Losses that compare a student's distribution over words with that of a teacher, token by token.

Equation: loss = (1 - w) T^2 mean_i D(z_i / T, s_i / T) + w CE,    i over the valid labels
Symbols: z (N, V) logits of the teacher, s those of the student, T temperature, D the divergence of the method, w
`label_weight`, CE the mean cross-entropy of the labels. T^2 keeps gradients as large as they are at T = 1.
G. Hinton et al., Distilling the Knowledge in a Neural Network, 2015, https://arxiv.org/abs/1503.02531.

A distillation alone, without its teacher, is CE: what runs a model before the teacher is there (planning, the proof of
a layout) and what judges it (evaluations, `gossamer eval`) takes that. `run/teacher.py` puts the teacher in.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.loss.distillation.labels_loss import LabelsLoss
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import from_0_to_1, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How far a distillation has come: `t` of the way from the student to the teacher; the loss of the step before
    (None before the first one); the momentum of its relative decrease.
    """

    t: float = 1.0
    loss_before: float | None = None
    momentum: float = 0.0


class Distillation(LabelsLoss):
    """A loss with a teacher, whose settings `Kl` explains.

    `is_adaptive`: its `Course` changes with the loss of every step.
    """

    __slots__ = ()
    is_adaptive: ClassVar[bool] = False

    teacher: str
    temperature: float
    label_weight: float
    tile_tokens: int
    top_k: int
    teacher_ranks: tuple[int, ...]

    def check(self) -> None:
        """Raise BadInput for wrong settings."""
        address_of(self.teacher)
        positive("temperature", self.temperature)
        positive("tile_tokens", self.tile_tokens)
        from_0_to_1("label_weight", self.label_weight)
        if self.top_k < 0:
            do = "give how many words of the teacher to keep, or 0 to run it beside the student"
            raise bad_input(wanted="0 or more words", got=str(self.top_k), do=do, key="top_k")
        if self.teacher_ranks and address_of(self.teacher) is not None:
            raise bad_input(
                wanted="no teacher_ranks with a teacher on another host, which every rank that computes the loss asks",
                got=", ".join(map(str, self.teacher_ranks)),
                do="leave teacher_ranks out",
                key="teacher_ranks",
            )
        if self.teacher_ranks and not self.top_k:
            raise bad_input(
                wanted="top_k with teacher_ranks, as the other ranks get the teacher's words and not all its logits",
                got="top_k 0",
                do="write top_k: 32, or leave teacher_ranks out",
                key="teacher_ranks",
            )

    @abstractmethod
    def divergence(self, student: Tensor, teacher: Tensor, t: float) -> Tensor:
        """Return D of each row, (n,), of logits (n, C) in float32, divided by the temperature. `t`: of the course."""

    def first(self) -> Course:
        """Return the course of the first step."""
        return Course()

    def after(self, course: Course, *, loss: float, done: int, total: int) -> Course:
        """Return the course after a step whose loss on all ranks was `loss`, the `done`-th of `total`."""
        return course
