"""Expert-wise distillation in a run: the loss of the labels, and the distance of the experts in the same forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.loss.expert_distillation import ExpertDistillation
from gossamer.run.teacher import CourseState, Taught


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTaughtLoss(Taught):
    """An expert-wise distillation whose teacher's experts run under hooks in the student.

    `distance`: how far the experts are apart in the newest forward with a graph; `course`: which teacher it is, for
    checkpoints.
    """

    inner: ExpertDistillation
    distance: Callable[[], Tensor]
    course: CourseState

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return self.inner(output, batch).float() + self.inner.expert_weight * self.distance()
