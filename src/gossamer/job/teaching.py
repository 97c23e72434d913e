"""The teacher of a run's loss: found, compared with the student and its data, and put into the loss before step 1."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.job.found_model import weights_at
from gossamer.job.rank_inputs import RankJob
from gossamer.job.trained_run import read_chosen
from gossamer.launch.environment import TEACHER_TOKEN
from gossamer.loss import Loss
from gossamer.loss._distillation import Distillation, address_of
from gossamer.loss._output import logits_of, loss_of, mean_cross_entropy, own_terms
from gossamer.loss.hidden import Hidden, distillation_in
from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.input_checks import check_sequence
from gossamer.model.side_effects import evaluating, untouched
from gossamer.model.text_stream import TextCoder
from gossamer.recipe.conflicts.side import pooled
from gossamer.run.batches import RankBatch, moved
from gossamer.run.engine import check_isolates, takes_positions
from gossamer.run.hidden_states import BlockTaps, EarthMovers, HiddenMaps, HiddenTerm, attach, blocks_of, token_rows
from gossamer.run.parts import Parts
from gossamer.run.remote_teacher.link import Patience, TeacherLink
from gossamer.run.remote_teacher.messages import Facts, Terms
from gossamer.run.remote_teacher.teacher import RemoteTeacher, RemoteTeacherBatches
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.teacher import CourseState, TaughtLoss, Teacher, check_widths, watched
from gossamer.run.teacher_cache import TeacherPass
from gossamer.run.trainer_services import Sink
from gossamer.saver._cut_head import head_of
from gossamer.saver._unmade_logits import ChangedInPlaceError, UnmadeLogits
from gossamer.spec import records
from gossamer.spec.errors import BadInput, bad_input

_KEY = "train.loss"
_ANSWER = 0.75  # of machines.timeout_s, in which a rank without progress is taken for hung: the teacher is named before
_AGAIN_S = 30.0
_DIGESTS = 1 << 48
_PROBE = 'def mean(xs):\n    """Return the mean."""\n    return sum(xs) / len(xs)  # 0.5 Zwölf, 数学\n'
_SAME = 1e-7  # nats: a divergence below it is rounding
_TERMS = 1e-2  # of the loss of the labels: a model's own one differs by less where it is computed in bfloat16
_TOKENIZER_FILES = ("token*", "vocab*", "spiece*", "sentencepiece*", "merges*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTeacher:
    """A teacher at its place. `positions`: tokens that it sees at most; `tokenizer`: None where it has none, for the
    reason `without`.
    """

    module: nn.Module
    tokenizer: Tokenizer | None
    positions: int | None
    without: str = "it has no tokenizer"


def refuse_elsewhere(written: str) -> None:
    """Raise BadInput for a teacher on another host, where the model itself is needed."""
    if address_of(written) is not None:
        raise bad_input(
            wanted="the folder of a run or of a Hugging Face model, or a GGUF file, as the model itself is needed here",
            got=written,
            do=f"give its folder, or train with `gossamer train` and train.loss: {{kl: {{teacher: {written}}}}}",
            key=_KEY,
        )


def place_of(written: str) -> Path:
    """Return where a teacher's folder or file is. Raises BadInput for none, and for one on another host."""
    refuse_elsewhere(written)
    place = Path(written).expanduser()
    if not written.strip() or not place.exists():
        raise bad_input(
            wanted="the folder of a run or of a Hugging Face model, or a GGUF file, as the teacher",
            got=f"{written!r}, which does not exist" if written.strip() else "none",
            do="name one that is there",
            key=_KEY,
        )
    return place


def with_tokenizer(found: FoundTeacher, place: Path) -> FoundTeacher:
    """Return a teacher from a Hugging Face folder or a GGUF file with its tokenizer, where it has one.

    Raises BadInput for one that is there and cannot be read.
    """
    if place.is_dir() and not any(next(place.glob(one), None) for one in _TOKENIZER_FILES):
        return replace(found, without=f"{place} has no tokenizer")
    try:
        return replace(found, tokenizer=parse_tokenizer(f"hf:{place}").make(lambda: (), identity="", cache=place))
    except BadInput as error:
        if place.is_dir():
            raise BadInput(f"the teacher's tokenizer cannot be read: {error.message}", key=_KEY) from None
        return replace(found, without=error.message)  # a GGUF file may hold one that only its own programs read


def find_teacher(written: str) -> FoundTeacher:
    """Load a teacher from the folder of a run or of a Hugging Face model, or from a GGUF file. Raises BadInput."""
    place = place_of(written)
    origin = weights_at(place)
    if origin is not None:
        return with_tokenizer(FoundTeacher(module=origin.build(0), tokenizer=None, positions=origin.positions()), place)
    run = read_chosen(place, "latest")
    known = run.origin.positions() if run.origin is not None else None
    return FoundTeacher(module=run.module, tokenizer=run.tokenizer, positions=known)


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
    if holds:
        found = find_teacher(inner.teacher)
        digest = int(digest_of(found.module))
        words, remarks = compared(facts_of(found), parts)
        teacher = _ready(found.module, parts, engine)
        width = teacher.width
    elif is_last and at is not None:
        elsewhere, words, remarks = _joined(at, inner, parts, engine, ending)
        digest, width = int(elsewhere.link.facts.digest, 16), elsewhere.ready.width
    if is_last:
        remarks += _tiled(engine, parts, teacher, ending)
    every = gathered(pump.channel, [float(digest), float(width), float(words or 0)])
    _check_same(every[:, 0].tolist(), inner.teacher)
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
    if teacher is not None and isinstance(parts.objective, Hidden):
        term, remark = matched(parts.objective, teacher, engine, parts, ending)
        loss, remarks = replace(loss, hidden=term), [*remarks, remark]
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


def _joined(
    at: tuple[str, int], inner: Distillation, parts: Parts, engine: ModelRuntime, ending: ExitStack
) -> tuple[RemoteTeacher, int | None, list[records.Event]]:
    """Return the teacher that listens there, the logits that count (None: all), and remarks. Raises BadInput."""
    limit_s = parts.config.machines.timeout_s
    patience = Patience(answer_s=_ANSWER * limit_s, again_s=min(_AGAIN_S, limit_s / 4))
    link = TeacherLink(*at, token=os.environ.get(TEACHER_TOKEN, ""), patience=patience)
    ending.callback(link.close)
    words, remarks = compared(link.facts, parts)
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
    )
    teacher = RemoteTeacher.of(link, terms, rows, parts.device)
    kind = "rows of hidden states, and its head once" if teacher.head else f"its {inner.top_k} most probable words"
    stages = "" if link.facts.part is None else f" in {link.facts.part.stages} stages, the last one"
    said = (
        f"{link.facts.parameters:,} parameters{stages} at {link.where}, which sends {kind}: "
        f"{teacher.bytes_per_token:,} bytes "
    )
    return teacher, words, [*remarks, teacher_event("info", f"{said}a token, while the student computes")]


def _check_same(digests: Sequence[float], written: str) -> None:
    """Raise BadInput where ranks have different teachers; those without one have 0."""
    if len(found := {one for one in digests if one}) > 1:
        told = ", ".join(f"{int(one):012x} on rank {digests.index(one)}" for one in sorted(found))
        do = "put the same weights at that place on all hosts, or name an address that means one host to all of them"
        raise bad_input(wanted="one teacher on all ranks", got=f"{told} at {written}", do=do, key=_KEY)


def teacher_event(level: Literal["info", "warning"], said: str) -> records.Event:
    """Return the record of what is to be said about a teacher."""
    return records.Event(level=level, message=f"teacher: {said}")


def facts_of(found: FoundTeacher, digest: float = 0.0) -> Facts:
    """Return what is compared of a teacher. `digest`: of its weights, where somebody compares it."""
    coder = found.tokenizer
    return Facts(
        parameters=_parameters(found.module),
        positions=found.positions,
        width=_width(found.module),
        tokens=None if coder is None else tuple(int(one) for one in coder.encode(_PROBE)),
        without=found.without,
        digest=f"{int(digest):012x}",
    )


def compared(facts: Facts, parts: Parts) -> tuple[int | None, list[records.Event]]:
    """Compare a teacher with the student and its data; return the logits that count (None: all), and remarks.

    Raises BadInput for other tokens, another vocabulary, or a teacher that sees fewer tokens than the data has.
    """
    remarks = list[records.Event]()
    if parts.words is not None:
        check_sequence(facts.positions, parts.config.data.sequence)
        if facts.tokens is not None:
            _check_tokens(facts.tokens, parts.words)
        else:
            said = f"{facts.without}, so that nothing has checked whether its tokens are those of the data"
            remarks.append(teacher_event("warning", said))
    words, ours, theirs = None, _width(parts.outline), facts.width
    if ours is not None and theirs is not None and ours != theirs:
        known = getattr(parts.words, "vocabulary", None)
        if facts.tokens is None or known is None or known > min(ours, theirs):
            check_widths(ours, theirs)
        words = known
        said = f"it gives {theirs:,} logits and the student {ours:,}: those of the {known:,} tokens count, the others "
        remarks.append(teacher_event("info", said + "are padding"))
    theirs_all, ours_all = facts.parameters, _parameters(parts.outline)
    if ours_all > theirs_all:
        said = f"it has {theirs_all:,} parameters, fewer than the student ({ours_all:,}): a smaller teacher is seldom "
        remarks.append(teacher_event("warning", said + "the better model"))
    return words, remarks


def _parameters(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _check_tokens(theirs: Sequence[int], ours: TextCoder) -> None:
    first, second = list(theirs), [int(one) for one in ours.encode(_PROBE)]
    if first != second:
        at = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        raise bad_input(
            wanted="a teacher whose tokenizer gives the tokens of the data",
            got=f"{first[at : at + 4]} where the data has {second[at : at + 4]}, from token {at} of a text on",
            do="set data.tokenizer to hf:TEACHER, and give the student its vocabulary",
            key=_KEY,
        )


def _width(module: nn.Module) -> int | None:
    """Return the number of a model's logits, where its head is one linear module."""
    try:
        return (
            int(head_of(module)[1].weight.shape[0])
            if callable(getattr(module, "get_output_embeddings", None))
            else None
        )
    except BadInput:
        return None


def digest_of(module: nn.Module, names: Collection[str] | None = None) -> float:
    """Return 48 bits of a hash of all weights, or of those with these names.

    It is the sum of one hash for each tensor, modulo 2^48: that of a whole model is the sum of those of its parts.
    """
    found = 0
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        if names is None or name in names:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            one = hashlib.sha256(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            one.update(data.numpy().data)
            found += int.from_bytes(one.digest()[:6], "big")
    return float(found % _DIGESTS)


def joined_digest(first: float, second: float) -> float:
    """Return the digest of all weights of two parts of a model, of those of each."""
    return float((int(first) + int(second)) % _DIGESTS)


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
    teacher = Teacher(module=module, caller=caller, parameters=_parameters(module))
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


def matched(
    asked: Hidden, teacher: Teacher, engine: ModelRuntime, parts: Parts, ending: ExitStack
) -> tuple[HiddenTerm, records.Event]:
    """Return the match of hidden states, with taps on both models and its maps in the student; `ending` undoes it.

    Both models run on the first rows, so that what does not fit is known now. Raises BadInput.
    """
    student = parts.module
    own, other = blocks_of(student, "the student"), blocks_of(teacher.module, "the teacher")
    pairs = [(own[at], other[to]) for at, to in asked.paired(len(own), len(other))]
    taps = BlockTaps.on("of the student", student, [one for one, _ in pairs])
    theirs = BlockTaps.on("of the teacher", teacher.module, [one for _, one in pairs])
    ending.callback(taps.remove)
    ending.callback(theirs.remove)
    rows = moved(parts.train.batch(np.arange(parts.train.together)), parts.device)
    with untouched(student), torch.no_grad(), evaluating(student), engine.precision.autocast(engine.device):
        engine.caller(engine.module, {name: one.clone() for name, one in rows.items()})
        teacher.rows(rows, rows["labels"].ndim + 1)
    widths = [
        {path: token_rows(one, rows, f"{path} {which.whose}").shape[1] for path, one in which.taken().items()}
        for which in (taps, theirs)
    ]
    sizes = [(widths[0][one], widths[1][another]) for one, another in pairs]
    is_emd = asked.layers == "emd"
    sets = list(dict.fromkeys(sizes)) if is_emd else sizes
    shapes = [asked.by.shapes(*one) for one in sets]
    numbered = [(*pair, sets.index(sizes[at]) if is_emd else at) for at, pair in enumerate(pairs)]
    maps = HiddenMaps(shapes, next(student.parameters()), parts.config.train.seed)
    ending.callback(attach(student, maps))
    told = ", ".join(f"{one} with {another}" for one, another in pairs)
    if is_emd:
        told = f"{len(own)} blocks with all {len(other)} of the teacher"
    said = f"{told}: {_parameters(maps):,} parameters of maps are trained too, and no part of the model"
    term = HiddenTerm(by=asked.by, weight=asked.match_weight, pairs=numbered, maps=maps, student=taps, teacher=theirs)
    if is_emd:
        term = replace(term, join=EarthMovers(len(own)))
    return term, teacher_event("info", f"hidden states of {said}")


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
