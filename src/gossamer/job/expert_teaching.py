"""The teacher of an expert-wise distillation: found, compared with the student, and hooked to its experts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.job.found_teacher import find_teacher
from gossamer.job.rank_inputs import RankJob
from gossamer.job.teacher_facts import check_same, compared, digest_of, facts_of, teacher_event
from gossamer.job.teaching import linked
from gossamer.loss.distillation import Course
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.loss.expert_distillation import ExpertDistillation
from gossamer.model.side_effects import evaluating, untouched
from gossamer.prune import distances_from, expert_distances
from gossamer.run.batches import moved
from gossamer.run.expert_loss import ExpertTaughtLoss
from gossamer.run.parts import Parts
from gossamer.run.remote_teacher.experts import RemoteExperts
from gossamer.run.remote_teacher.messages import Terms
from gossamer.run.remote_teacher.teacher import given
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.teacher import CourseState
from gossamer.run.trainer_services import Sink
from gossamer.spec import records


def taught_by_experts(
    job: RankJob, engine: ModelRuntime, pump: CommThread, sink: Sink, ending: ExitStack
) -> ModelRuntime:
    """Return the model with the teacher's experts in the loss, where the loss asks for them; `ending` takes them off.

    Every rank has the teacher. Raises BadInput for a student without experts, or a teacher that has others.
    """
    parts, inner = job.parts, job.parts.objective
    if not isinstance(inner, ExpertDistillation):
        return engine
    job.at(0, "teacher")
    at, elsewhere = address_of(inner.teacher), None
    if at is None:
        found = find_teacher(inner.teacher)
        facts, digest = facts_of(found), digest_of(found.module)
        teacher = found.module.eval().requires_grad_(False).to(parts.device, next(parts.module.parameters()).dtype)
        distance = ending.enter_context(expert_distances(parts.module, teacher))
    else:
        elsewhere = RemoteExperts(linked(at, parts, ending), parts.device)
        facts, digest = elsewhere.link.facts, float(int(elsewhere.link.facts.digest, 16))
        distance = ending.enter_context(distances_from(parts.module, elsewhere))
        _agree(elsewhere, engine, parts)
    _, remarks = compared(facts, parts)
    every = gathered(pump.channel, [digest])[:, 0]
    check_same(every.tolist(), inner.teacher)
    digest = float(every.max())
    loss = ExpertTaughtLoss(
        inner=inner,
        distance=distance,
        course=CourseState(now=Course(), total=parts.config.train.steps, teacher=f"{int(digest):012x}"),
    )
    looked = _first_look(engine, parts, loss)
    for one in (*remarks, looked, *([] if elsewhere is None else [_told(elsewhere, parts)])):
        sink(one)
    return replace(engine, objective=loss)


def _agree(teacher: RemoteExperts, engine: ModelRuntime, parts: Parts) -> None:
    """Come to an agreement with a teacher on another host about the student's experts. Raises BadInput."""
    rows = parts.train.batch(np.arange(parts.train.together))
    terms = Terms(
        top_k=0,
        temperature=1.0,
        words=None,
        tile_tokens=1,
        precision=engine.precision.name,
        dims=rows["labels"].ndim + 1,
        isolates=False,
        wants_head=False,
        experts=tuple(teacher.layers),
        dtype=str(next(parts.module.parameters()).dtype).removeprefix("torch."),
    )
    teacher.link.agree(terms, given(rows))


def _told(teacher: RemoteExperts, parts: Parts) -> records.Event:
    """Return what is said of a teacher on another host, once it was asked for the first rows."""
    rows = parts.train.batch(np.arange(parts.train.together))
    sent, came = (round(size / rows["input_ids"].numel()) for size in (teacher.sent_bytes, teacher.came_bytes))
    said = f"{teacher.link.facts.parameters:,} parameters at {teacher.link.where}, whose experts are asked at each "
    said += f"micro-batch: {sent:,} bytes a token there, {came:,} back, while the student waits"
    return teacher_event("info", said)


def _first_look(engine: ModelRuntime, parts: Parts, loss: ExpertTaughtLoss) -> records.Event:
    """Run the student on the first rows, so that experts which cannot be compared are known now; say both terms."""
    rows = moved(parts.train.batch(np.arange(parts.train.together)), parts.device)
    look = replace(engine, objective=loss.inner)
    with untouched(engine.module), evaluating(engine.module):
        labels = float(look.loss_of_copies(rows, step=0, key=0).detach())
        apart = float(loss.distance().detach())
    if not apart:
        said = "its experts are those of the student already: there is nothing to learn from them"
        return teacher_event("warning", said)
    return teacher_event(
        "info",
        f"its experts are {apart:.4g} from those of the student, beside a loss of {labels:.4g} of the labels; "
        f"expert_weight {loss.inner.expert_weight:g} adds {loss.inner.expert_weight * apart:.4g}, {labels / apart:.3g} "
        "would make both equal",
    )
