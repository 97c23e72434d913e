"""The teacher of a run's loss: found, compared with the student and its data, and put into the loss before step 1."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.job.found_teacher import find_teacher
from gossamer.job.hidden_matching import Pairs, matched_beside, matched_elsewhere, pairs_elsewhere
from gossamer.job.rank_inputs import RankJob
from gossamer.job.teacher_facts import check_same, compared, count_parameters, digest_of, facts_of, teacher_event
from gossamer.launch.environment import TEACHER_TOKEN
from gossamer.loss import Loss
from gossamer.loss.distillation import Distillation
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.loss.hidden import Hidden, distillation_in
from gossamer.loss.inputs.labels import mean_cross_entropy
from gossamer.loss.inputs.model_output import logits_of, loss_of, own_terms
from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.side_effects import evaluating, untouched
from gossamer.recipe.conflicts.side import pooled
from gossamer.run.batches import RankBatch, moved
from gossamer.run.engine import check_isolates, takes_positions
from gossamer.run.parts import Parts
from gossamer.run.remote_teacher.link import Patience, TeacherLink
from gossamer.run.remote_teacher.messages import Terms
from gossamer.run.remote_teacher.teacher import RemoteTeacher, RemoteTeacherBatches
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.teacher import CourseState, TaughtLoss, Teacher, watched
from gossamer.run.teacher_cache import TeacherPass
from gossamer.run.trainer_services import Sink
from gossamer.saver.head.unmade_logits import ChangedInPlaceError, UnmadeLogits
from gossamer.spec import records
from gossamer.spec.errors import bad_input

_KEY = "train.loss"
_ANSWER = 0.75  # of machines.timeout_s, in which a rank without progress is taken for hung: the teacher is named before
_AGAIN_S = 30.0
_SAME = 1e-7  # nats: a divergence below it is rounding


def taught(
    job: RankJob, engine: ModelRuntime, pump: CommThread, sink: Sink, ending: ExitStack
) -> tuple[RankJob, ModelRuntime]:
    """Return the job and the model with the teacher in the loss, where the loss has one; `ending` undoes it.

    The teacher is on the ranks that compute the loss, those of the last stage, or on some of them. Raises BadInput.
    """
    inner, parts = distillation_in(job.parts.objective), job.parts
    if inner is None:
        return job, engine
    job.at(0, "teacher")
    is_last = parts.cut is None or len(parts.cut.parts) - 1 in parts.cut.stages
    at = address_of(inner.teacher)
    holds = is_last and at is None and (not inner.teacher_ranks or pump.channel.rank in inner.teacher_ranks)
    teacher, elsewhere, digest, width = None, None, 0, 0
    words, remarks = None, list[records.Event]()
    pairs: Pairs = ()
    if holds:
        found = find_teacher(inner.teacher)
        digest = int(digest_of(found.module))
        words, remarks = compared(facts_of(found), parts)
        teacher = _ready(found.module, parts, engine)
        width = teacher.width
    elif is_last and at is not None:
        elsewhere, words, remarks, pairs = _joined(at, inner, parts, engine, ending)
        digest, width = int(elsewhere.link.facts.digest, 16), elsewhere.ready.width
    if is_last:
        remarks += _tiled(engine, parts, teacher, ending)
    every = gathered(pump.channel, [float(digest), float(width), float(words or 0)])
    check_same(every[:, 0].tolist(), inner.teacher)
    most, width, counted = (int(one) for one in every.max(0).values)
    words, named = counted or None, f"{most:012x}"
    course = CourseState(now=inner.first(), total=parts.config.train.steps, teacher=named)
    loss = TaughtLoss(
        inner=inner,
        teacher=teacher,
        course=course,
        width=width,
        words=words,
        computes=is_last,
        elsewhere=elsewhere,
    )
    if isinstance(parts.objective, Hidden) and (teacher is not None or elsewhere is not None):
        if teacher is not None:
            term, said = matched_beside(parts.objective, teacher, engine, parts, ending)
        else:
            assert elsewhere is not None
            term, said = matched_elsewhere(parts.objective, pairs, elsewhere, engine, parts, ending)
        loss, remarks = replace(loss, hidden=term), [*remarks, teacher_event("info", said)]
    if teacher is not None:
        how = "run once over the training data" if inner.top_k else "run beside the student"
        remarks.append(teacher_event("info", f"{teacher.parameters:,} parameters, {how} without gradients"))
    if (teacher is not None or elsewhere is not None) and parts.cut is None:
        remarks += _first_look(engine, parts, loss)
    for one in remarks:
        sink(one)
    if elsewhere is not None:
        job = replace(job, parts=replace(parts, train=RemoteTeacherBatches(parts.train, elsewhere)))
    if not inner.top_k or at is not None:
        return job, replace(engine, objective=loss)
    asked = TeacherPass(
        parts=parts,
        inner=inner,
        teacher=teacher,
        words=words,
        precision=engine.precision,
        pump=pump,
        folder=job.directory.path,
        digest=named,
        data=job.data.fingerprint,
        writes=job.where.writer == 0,
        at=job.at,
        tell=lambda message: sink(teacher_event("info", message)),
    )
    job = replace(job, parts=replace(parts, train=asked.made()))
    return job, replace(engine, objective=replace(loss, teacher=None))


def linked(at: tuple[str, int], parts: Parts, ending: ExitStack) -> TeacherLink:
    """Return a connection to the teacher that listens there, which `ending` closes. Raises BadInput."""
    limit_s = parts.config.machines.timeout_s
    patience = Patience(answer_s=_ANSWER * limit_s, again_s=min(_AGAIN_S, limit_s / 4))
    link = TeacherLink(*at, token=os.environ.get(TEACHER_TOKEN, ""), patience=patience)
    ending.callback(link.close)
    return link


def _joined(
    at: tuple[str, int], inner: Distillation, parts: Parts, engine: ModelRuntime, ending: ExitStack
) -> tuple[RemoteTeacher, int | None, list[records.Event], Pairs]:
    """Return the teacher that listens there, the logits that count (None: all), remarks, and the blocks that are
    compared. Raises BadInput.
    """
    link = linked(at, parts, ending)
    words, remarks = compared(link.facts, parts)
    asked = parts.objective
    pairs = pairs_elsewhere(asked, parts, link.facts) if isinstance(asked, Hidden) else ()
    rows = parts.train.batch(np.arange(parts.train.together))
    if rows["labels"].ndim > 1 and (error := pooled(parts.config)) is not None:
        raise error
    terms = Terms(
        top_k=inner.top_k,
        temperature=inner.temperature,
        words=words,
        tile_tokens=inner.tile_tokens,
        precision=engine.precision.name,
        dims=rows["labels"].ndim + 1,
        isolates="position_ids" in rows and takes_positions(engine.caller),
        wants_head=not inner.top_k,
        blocks=tuple(dict.fromkeys(block for _, block in pairs)),
    )
    teacher = RemoteTeacher.of(link, terms, rows, parts.device)
    kind = "rows of hidden states, and its head once" if teacher.head else f"its {inner.top_k} most probable words"
    if terms.blocks:
        kind += f", and the states of {len(terms.blocks)} blocks"
    stages = "" if link.facts.part is None else f" in {link.facts.part.stages} stages, the last one"
    said = (
        f"{link.facts.parameters:,} parameters{stages} at {link.where}, which sends {kind}: "
        f"{teacher.bytes_per_token:,} bytes "
    )
    return teacher, words, [*remarks, teacher_event("info", f"{said}a token, while the student computes")], pairs


def _ready(module: nn.Module, parts: Parts, engine: ModelRuntime) -> Teacher:
    """Return a teacher that only computes: frozen, in evaluation mode, on the student's device.

    Raises BadInput for one that is not told where documents begin, and for a student that reads later tokens.
    """
    module = module.eval().requires_grad_(False).to(parts.device)
    rows = moved(parts.train.batch(np.arange(parts.train.together)), parts.device)
    if rows["labels"].ndim > 1 and (error := pooled(parts.config)) is not None:
        raise error
    caller = caller_of(module, [name for name in rows if name != "labels"])
    if "position_ids" in rows and takes_positions(engine.caller):
        check_isolates(module, caller, "of the teacher ")
    teacher = Teacher(module=module, caller=caller, parameters=count_parameters(module))
    with untouched(module), engine.precision.autocast(engine.device):
        return replace(teacher, width=teacher.rows(rows, rows["labels"].ndim + 1).width)


def _tiled(engine: ModelRuntime, parts: Parts, teacher: Teacher | None, ending: ExitStack) -> list[records.Event]:
    """Let the heads of both, where they are here, leave their logits to the loss; return what is to be said where one
    does not.
    """
    remarks = list[records.Event]()
    rows = moved(parts.train.batch(np.arange(parts.train.together)), parts.device)
    asked = {"the student's": (engine.module, engine.caller)}
    if teacher is not None:
        asked = {"its": (teacher.module, teacher.caller), **asked}
    for whose, (module, caller) in asked.items():
        is_student, is_cut = module is engine.module, parts.cut is not None
        if is_student and parts.recipe.sharding.takes_parameters:
            undo, why = _nothing, "its parameters are sharded"
        elif is_student and is_cut:
            undo, why = watched(module, is_declared=True)
        else:
            undo, why = watched(module)
            if not why and not _leaves_logits(module, caller, rows, engine):
                undo()
                undo, why = _nothing, "its head is not what gives them"
        ending.callback(undo)
        if why:
            remarks.append(teacher_event("info", f"{whose} logits are held whole, as {why}"))
    return remarks


def _leaves_logits(module: nn.Module, caller: ForwardAdapter, rows: RankBatch, engine: ModelRuntime) -> bool:
    """Return whether a forward of a watched model returns logits that have not been computed."""
    copies = {name: one.clone() for name, one in rows.items()}
    try:
        with untouched(module), torch.no_grad(), engine.precision.autocast(engine.device):
            found = logits_of(caller(module, copies), dims=copies["labels"].ndim + 1, shape="(batch, words)")
    except ChangedInPlaceError:
        return False
    return isinstance(found, UnmadeLogits) and found.product.logits is None


def _nothing() -> None:
    pass


def _first_look(engine: ModelRuntime, parts: Parts, loss: TaughtLoss) -> list[records.Event]:
    """Run both models on the first rows, so that what does not fit is known now; say if they are equal already.

    Raises BadInput for a student with another vocabulary, whose own loss is not that of the labels, or that is
    infinitely far from its teacher.
    """
    rows = moved(parts.train.batch(np.arange(parts.train.together)), parts.device)
    look = replace(engine, objective=_FirstLook(loss))
    with untouched(engine.module), torch.no_grad(), evaluating(engine.module):
        value = float(look.loss_of_copies(rows, step=0, key=0))
    if math.isinf(value):
        raise bad_input(
            wanted="a student and a teacher for which the same words are possible",
            got="an infinite divergence on the first rows: one gives a logit of -inf to a word that the other expects",
            do="mask the same words in both models, or choose jsd, which is finite then",
            key=_KEY,
        )
    if abs(value) < _SAME and float(loss.weight(rows)):
        said = "the student gives its outputs already: the loss begins at 0, and there is nothing to learn from it"
        return [teacher_event("warning", said)]
    return []


@dataclass(frozen=True, slots=True, eq=False)
class _FirstLook(Loss):
    """How far a student is from its teacher itself. Raises BadInput where its own loss is not that of the labels."""

    taught: TaughtLoss

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        own = loss_of(output)
        if own is not None and int(self.weight(batch)):
            logits, labels = self.taught.predictions(output, batch)
            plain = mean_cross_entropy(logits.flatten(0, -2), labels.flatten()).item()
            rounding = 1e-4 if logits.dtype is torch.float32 else 1e-2
            if abs(own.item() - plain) > rounding * max(1.0, plain):
                raise own_terms(f"a loss of {own.item():.6g} where the cross-entropy is {plain:.6g}")
        return self.taught.apart(output, batch, 1.0)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.taught.weight(batch)
