"""The match of hidden states of a run: which blocks, the hooks on them, and the learned maps in the student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch

from gossamer.loss.hidden import Hidden
from gossamer.model.side_effects import evaluating, untouched
from gossamer.run.batches import RankBatch, moved
from gossamer.run.hidden_states import (
    BlockTaps,
    EarthMovers,
    HiddenMaps,
    HiddenTerm,
    TappedStates,
    TeacherStates,
    attach,
    blocks_of,
    label_rows,
)
from gossamer.run.parts import Parts
from gossamer.run.remote_teacher.messages import MOST_BLOCKS, Facts
from gossamer.run.remote_teacher.teacher import RemoteTeacher
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.teacher import Teacher
from gossamer.spec.errors import BadInput, bad_input

_KEY = "train.loss.hidden"
Pairs = Sequence[tuple[str, str]]


def pairs_beside(asked: Hidden, parts: Parts, teacher: Teacher) -> Pairs:
    """Return the paths of the blocks that are compared, of the student and of a teacher beside it. Raises BadInput."""
    return asked.paired(blocks_of(parts.module, "the student"), blocks_of(teacher.module, "the teacher"))


def pairs_elsewhere(asked: Hidden, parts: Parts, teacher: Facts) -> Pairs:
    """Return the same of a teacher on another host, of the blocks that its greeting names. Raises BadInput."""
    if not teacher.blocks:
        raise BadInput(teacher.without_blocks, key=_KEY)
    found = asked.paired(blocks_of(parts.module, "the student"), teacher.blocks)
    if (count := len({block for _, block in found})) > MOST_BLOCKS:
        raise bad_input(
            wanted=f"at most {MOST_BLOCKS} blocks of a teacher on another host",
            got=str(count),
            do="set pairs to a smaller number",
            key=_KEY,
        )
    return found


def matched_beside(
    asked: Hidden, teacher: Teacher, engine: ModelRuntime, parts: Parts, ending: ExitStack
) -> tuple[HiddenTerm, str]:
    """Return the match with a teacher beside the student, and what is to be said of it; `ending` undoes it.

    Both models run on the first rows, so that what does not fit is known now. Raises BadInput.
    """
    pairs, rows = pairs_beside(asked, parts, teacher), _first_rows(parts)
    taps = BlockTaps.on("of the teacher", teacher.module, [one for _, one in pairs])
    ending.callback(taps.remove)
    with torch.no_grad(), engine.precision.autocast(engine.device):
        teacher.rows(rows, rows["labels"].ndim + 1)
    widths = {path: label_rows(one, rows, f"{path} of the teacher").shape[1] for path, one in taps.taken().items()}
    return _matched(asked, pairs, widths, TappedStates(taps), engine, parts, ending)


def matched_elsewhere(
    asked: Hidden, pairs: Pairs, teacher: RemoteTeacher, engine: ModelRuntime, parts: Parts, ending: ExitStack
) -> tuple[HiddenTerm, str]:
    """Return the match with a teacher on another host, which has consented to send the states of `pairs`."""
    widths = {one.block: one.width for one in teacher.ready.states}
    return _matched(asked, pairs, widths, teacher.states, engine, parts, ending)


def _matched(
    asked: Hidden,
    pairs: Pairs,
    theirs: Mapping[str, int],
    states: TeacherStates,
    engine: ModelRuntime,
    parts: Parts,
    ending: ExitStack,
) -> tuple[HiddenTerm, str]:
    """Put taps on the student and the maps into it. `theirs`: the widths of the teacher's blocks."""
    student, rows = parts.module, _first_rows(parts)
    taps = BlockTaps.on("of the student", student, [one for one, _ in pairs])
    ending.callback(taps.remove)
    with untouched(student), torch.no_grad(), evaluating(student), engine.precision.autocast(engine.device):
        engine.caller(engine.module, {name: one.clone() for name, one in rows.items()})
    ours = {path: label_rows(one, rows, f"{path} of the student").shape[1] for path, one in taps.taken().items()}
    sizes = [(ours[one], theirs[other]) for one, other in pairs]
    is_emd = asked.layers == "emd"
    sets = list(dict.fromkeys(sizes)) if is_emd else sizes
    numbered = [(*pair, sets.index(sizes[at]) if is_emd else at) for at, pair in enumerate(pairs)]
    maps = HiddenMaps([asked.by.shapes(*one) for one in sets], next(student.parameters()), parts.config.train.seed)
    ending.callback(attach(student, maps))
    term = HiddenTerm(by=asked.by, weight=asked.match_weight, pairs=numbered, maps=maps, student=taps, teacher=states)
    told = ", ".join(f"{one} with {other}" for one, other in pairs)
    if is_emd:
        term = replace(term, join=EarthMovers(len(ours)))
        told = f"{len(ours)} blocks with all {len(theirs)} of the teacher"
    count = sum(one.numel() for one in maps.parameters())
    return term, f"hidden states of {told}: {count:,} parameters of maps are trained too, and no part of the model"


def _first_rows(parts: Parts) -> RankBatch:
    return moved(parts.train.batch(np.arange(parts.train.together)), parts.device)
