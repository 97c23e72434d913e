"""The teacher of an expert-wise distillation: found, compared with the student, and hooked to its experts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.job.rank_inputs import RankJob
from gossamer.job.teaching import compared, digest_of, facts_of, find_teacher, teacher_event
from gossamer.loss.distillation import Course
from gossamer.loss.expert_distillation import ExpertDistillation
from gossamer.model.side_effects import evaluating, untouched
from gossamer.prune import expert_distances
from gossamer.run.batches import moved
from gossamer.run.expert_loss import ExpertTaughtLoss
from gossamer.run.parts import Parts
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
    found = find_teacher(inner.teacher)
    _, remarks = compared(facts_of(found), parts)
    (digest,) = gathered(pump.channel, [digest_of(found.module)]).max(0).values
    teacher = found.module.eval().requires_grad_(False).to(parts.device, next(parts.module.parameters()).dtype)
    distance = ending.enter_context(expert_distances(parts.module, teacher))
    loss = ExpertTaughtLoss(
        inner=inner,
        distance=distance,
        course=CourseState(now=Course(), total=parts.config.train.steps, teacher=f"{int(digest):012x}"),
    )
    for one in (*remarks, _first_look(engine, parts, loss)):
        sink(one)
    return replace(engine, objective=loss)


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
