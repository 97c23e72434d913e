"""A loss with its teacher: a frozen model beside the student, or what was kept of one, and how far the run has come."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.loss import IGNORE, Loss
from gossamer.loss.distillation import Course, Distillation
from gossamer.loss.inputs.labels import targets
from gossamer.loss.inputs.model_output import check_no_terms, logits_of
from gossamer.model.forward_adapter import ForwardAdapter
from gossamer.ops.tiled_logits import HeadRows, by_token, coarse
from gossamer.run.batches import row_slices
from gossamer.run.hidden_states import HiddenTerm
from gossamer.run.step_algorithm import ReplayedSteps, StepAlgorithm, StepAttempt
from gossamer.run.task import Task
from gossamer.saver.head.cut_head import CutHead, HeadWatch, head_of
from gossamer.saver.head.unmade_logits import UnmadeLogits
from gossamer.spec.errors import BadInput, bad_input
from gossamer.sync import StepAgreement

WORDS, LOG_PROBABILITIES = "loss.teacher_words", "loss.teacher_log_probabilities"
_KEY = "train.loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A frozen model in evaluation mode. `parameters`: how many it has; `width`: logits that it gives for a token."""

    module: nn.Module
    caller: ForwardAdapter
    parameters: int
    width: int = 0

    @torch.no_grad()
    def rows(self, batch: Mapping[str, Tensor], dims: int) -> HeadRows:
        """Return the logits (N, V) for a batch, with all dims but the last as one. It never sees labels."""
        given = {name: one for name, one in batch.items() if name != "labels"}
        return head_rows(logits_of(self.caller(self.module, given), dims=dims, shape="of the teacher"))


@dataclass(frozen=True, slots=True)
class KnownWords:
    """The teacher's most probable words of some tokens, (n, k), and their log-probabilities, (n, k + 1): the last one
    is that of all other words together.
    """

    words: Tensor
    log_probabilities: Tensor


class TeacherElsewhere(ABC):
    """A teacher that is asked for the tokens of a batch."""

    @abstractmethod
    def answer(self, batch: Mapping[str, Tensor], valid: Tensor) -> HeadRows | KnownWords:
        """Return what it says of the tokens whose numbers are `valid`, those with a label that counts."""


@dataclass(slots=True)
class CourseState:
    """The course of a distillation on one rank; the same on all ranks."""

    now: Course
    total: int  # steps
    teacher: str = ""  # digest

    def meta(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps."""
        now = self.now
        course = {"t": now.t, "loss_before": now.loss_before, "momentum": now.momentum}
        return {**course, "teacher": self.teacher}

    def restore(self, kept: Mapping[str, Any]) -> str:
        """Restore what `meta` returned; return a note for the user, "" for none."""
        before, notes = kept.get("loss_before"), list[str]()
        if before is not None:
            momentum = max(-1.0, min(1.0, float(kept["momentum"])))  # it was without bounds in earlier versions
            self.now = Course(t=float(kept["t"]), loss_before=float(before), momentum=momentum)
        elif kept.get("t", self.now.t) != self.now.t:  # that of a loss without a course, whose t is 1 at all steps
            notes.append(f"the loss was another one before: its course begins here, at t = {self.now.t:g}")
        if kept.get("teacher", self.teacher) != self.teacher:
            notes.append("the teacher is another one than before")
        return "; ".join(notes)


class Taught(Loss):
    """A loss with its teacher in place; `inner`: it without, which judges the model; `course`: for checkpoints."""

    __slots__ = ()
    inner: Loss
    course: CourseState

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.inner.weight(batch)

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.inner.predictions(output, batch)

    def evaluated(self) -> Loss:
        return self.inner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaughtLoss(Taught):
    """A distillation with its teacher, beside the student or `elsewhere`; both None: batches hold what was kept of it.
    `width`: logits of the teacher; `words`: those that count, None: all; `computes`: whether this rank has the last
    stage; others have no logits, and no use for a teacher. `hidden`: the match of hidden states, None without one.

    Logits of the student that its head has not computed are computed in tiles, and those of the teacher likewise.
    """

    inner: Distillation
    teacher: Teacher | None
    course: CourseState
    width: int = 0
    words: int | None = None
    computes: bool = True
    hidden: HiddenTerm | None = None
    elsewhere: TeacherElsewhere | None = None

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        loss = self._of_outputs(output, batch)
        return loss if self.hidden is None else loss + self.hidden.loss(batch)

    def _of_outputs(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if not self.computes:
            return self.inner(output, batch)
        weight = self.inner.label_weight
        loss = self.apart(output, batch, self.course.now.t)
        if not weight:
            return loss
        return (1 - weight) * loss + (weight * self.inner(output, batch) if int(self.weight(batch)) else 0.0)

    def apart(self, output: Any, batch: Mapping[str, Tensor], t: float) -> Tensor:
        """Return how far the student is from the teacher: the mean over the valid labels, 0 without any.

        Raises BadInput for a student with another vocabulary, or with loss terms of its own.
        """
        inner, temperature = self.inner, self.inner.temperature
        check_no_terms(output)
        labels = targets(batch)
        dims = batch["labels"].ndim + 1
        student = head_rows(logits_of(output, dims=dims, shape="(batch, sequence, vocabulary)"), self.words)
        if self.words is None:
            check_widths(student.width, self.width)
        valid = (labels != IGNORE).nonzero().squeeze(1)
        is_whole, count = valid.numel() == labels.numel(), valid.numel()
        student = student if is_whole else student.chosen(valid)
        theirs = self._theirs(batch, dims, valid, is_whole=is_whole)
        if isinstance(theirs, KnownWords):
            chosen, known = theirs.words, theirs.log_probabilities

            def value(logits: Tensor, some: slice) -> Tensor:
                return inner.divergence(coarse(logits / temperature, chosen[some]), known[some], t)

        else:
            teacher = replace(theirs, words=self.words)

            def value(logits: Tensor, some: slice) -> Tensor:
                with torch.no_grad():
                    wanted = teacher.logits(some)
                return inner.divergence(logits / temperature, wanted / temperature, t)

        losses = by_token(student, value, tile=inner.tile_tokens)
        return temperature**2 * losses.sum() / max(count, 1)

    def _theirs(
        self, batch: Mapping[str, Tensor], dims: int, valid: Tensor, *, is_whole: bool
    ) -> HeadRows | KnownWords:
        """Return what the teacher says of the valid tokens."""
        if self.elsewhere is not None:
            return self.elsewhere.answer(batch, valid)
        if self.teacher is not None:
            every = self.teacher.rows(batch, dims)
            return every if is_whole else every.chosen(valid)
        words, known = (batch[name].flatten(0, -2)[valid] for name in (WORDS, LOG_PROBABILITIES))
        return KnownWords(words.long(), known)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoursedStep(StepAlgorithm):
    """A step whose loss, the mean over all ranks, moves the course of an adaptive distillation."""

    inner: StepAlgorithm
    loss: TaughtLoss

    def attempt(self, task: Task) -> StepAttempt:
        return self.inner.attempt(task)

    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        self.inner.commit(task, agreement, updates=updates)
        course = self.loss.course
        if agreement.weight and math.isfinite(agreement.loss):
            done = task.window.step + 1
            course.now = self.loss.inner.after(course.now, loss=agreement.loss, done=done, total=course.total)

    def reject(self, task: Task) -> None:
        self.inner.reject(task)

    def begin(self, done: int, until: int) -> ReplayedSteps:
        return self.inner.begin(done, until)

    def settle(self, done: int) -> None:
        self.inner.settle(done)

    def close(self) -> None:
        self.inner.close()


def head_rows(logits: Tensor, words: int | None = None) -> HeadRows:
    """Return logits (*, V) as rows; those that a head has not computed stay so."""
    if isinstance(logits, UnmadeLogits) and logits.product.logits is None:
        product, hidden = logits.product, logits.hidden
        return HeadRows(
            hidden=hidden.reshape(-1, hidden.shape[-1]),
            weight=product.weight,
            bias=product.bias,
            map=logits.map,
            compute=product.compute,
            words=words,
        )
    plain = logits.made("a distillation") if isinstance(logits, UnmadeLogits) else logits
    return HeadRows(hidden=plain.reshape(-1, plain.shape[-1]), words=words)


def most_probable(rows: HeadRows, k: int, *, temperature: float, tile: int) -> KnownWords:
    """Return the k most probable words of every row. Raises BadInput for more words than there are."""
    if k >= rows.width:
        do = "keep fewer words, or set top_k to 0 to have all of them compared"
        raise bad_input(wanted=f"fewer than {rows.width:,} words", got=str(k), do=do, key=_KEY)
    words, logs = [rows.hidden.new_zeros(0, k, dtype=torch.int64)], [torch.zeros(0, k + 1, device=rows.hidden.device)]
    for some in row_slices(rows.hidden.shape[0], tile):
        logits = rows.logits(some).float() / temperature
        words.append(logits.topk(k, dim=1).indices)
        logs.append(coarse(logits, words[-1]).log_softmax(1).clamp(min=-100.0))
    return KnownWords(torch.cat(words), torch.cat(logs))


def check_widths(student: int, teacher: int) -> None:
    """Raise BadInput where student and teacher give different numbers of logits."""
    if student != teacher:
        raise bad_input(
            wanted=f"a teacher with the vocabulary of the student, {student:,} logits",
            got=f"one with {teacher:,}",
            do="use the teacher's tokenizer (data.tokenizer: hf:TEACHER) and a student with its vocabulary, "
            "or a teacher of the student's model family",
            key=_KEY,
        )


def watched(module: nn.Module, *, is_declared: bool = False) -> tuple[Callable[[], None], str]:
    """Let a model's head leave its logits to those who read them; return what undoes it, and why it could not.

    `is_declared`: only where the model itself says which module its head is.
    """
    declared = getattr(module, "get_output_embeddings", None)
    if is_declared and not (callable(declared) and declared() is not None):
        return _nothing, "it does not declare its head"
    try:
        _, head = head_of(module)
    except BadInput:
        return _nothing, "they do not come from one nn.Linear that is not compiled"
    cut = CutHead(head=head, by="tiles", in_forward=False, filter=0.0, is_outline=False)
    return HeadWatch(cut).remove, ""


def _nothing() -> None:
    pass
