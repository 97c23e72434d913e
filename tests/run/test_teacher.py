"""A loss with its teacher beside what it would leave out, and its course over a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.loss.kl import Kl
from gossamer.loss.taid import Taid
from gossamer.model.forward_adapter import caller_of
from gossamer.run.teacher import LOG_PROBABILITIES, WORDS, CourseState, TaughtLoss, Teacher
from gossamer.spec.errors import BadInput

WIDTH = 11


class Table(nn.Module):
    def __init__(self, words: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, words)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.table(input_ids)
        return found


def rows() -> dict[str, Tensor]:
    ids = torch.arange(8).view(2, 4)
    return {"input_ids": ids, "labels": ids}


def taught(teacher: nn.Module | None, width: int = WIDTH) -> TaughtLoss:
    held = None if teacher is None else Teacher(module=teacher, caller=caller_of(teacher), parameters=1)
    inner = Kl(teacher="x")
    return TaughtLoss(inner=inner, teacher=held, course=CourseState(now=inner.first(), total=9), width=width)


def test_a_student_with_a_loss_beside_that_of_its_outputs_is_refused() -> None:
    loss, logits = taught(Table()), Table()(rows()["input_ids"])
    assert loss({"logits": logits, "aux_loss": None}, rows()).isfinite()
    with pytest.raises(BadInput, match="an aux_loss"):
        loss({"logits": logits, "aux_loss": logits.mean()}, rows())


@pytest.mark.parametrize("width", [WIDTH - 2, WIDTH + 2])
def test_a_kept_teacher_of_another_width_is_refused(width: int) -> None:
    """Its words are numbers below its width: nothing else would tell."""
    kept = {WORDS: torch.zeros(2, 4, 1, dtype=torch.int32), LOG_PROBABILITIES: torch.full((2, 4, 2), 0.5).log()}
    logits = Table()(rows()["input_ids"])
    assert taught(None)(logits, {**rows(), **kept}).isfinite()
    with pytest.raises(BadInput, match=f"got one with {width}"):
        taught(None, width)(logits, {**rows(), **kept})


def test_a_course_goes_on_with_its_own_loss_alone() -> None:
    method = Taid(teacher="x", alpha=0.5)

    def state(by: str) -> CourseState:
        return CourseState(now=method.first() if by == "taid" else Kl(teacher="x").first(), total=10, by=by)

    begun, again = state("taid"), state("taid")
    begun.now = method.after(begun.now, loss=2.0, done=1, total=10)
    assert again.restore(begun.meta()) == "" and again.now == begun.now
    other = state("taid")
    assert other.restore(state("kl").meta()) == "the course of taid begins now: kl came before"
    assert other.now == method.first() != state("kl").now
    older: dict[str, Any] = dict(begun.meta())
    del older["by"]  # a checkpoint from before it was kept
    kept = state("taid")
    assert kept.restore(older) == "" and kept.now == begun.now
