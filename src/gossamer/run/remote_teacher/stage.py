"""A stage of a teacher in this process, and a student's way to the stage before.

A stage is that of a training in stages (`model.split`): the whole forward runs, with placeholders for the modules of
other stages. Each question of a student goes back through the stages to the first one; what a stage sends to the next
is the answer. So tokens travel one way, and rows cross each border once.

    student  --tokens-->  stage 3  --tokens-->  stage 2  --tokens-->  stage 1
             <--rows---            <--border---          <--border---
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from gossamer.loss.inputs.model_output import logits_of
from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.precision import Precision
from gossamer.model.split.dataflow import CallOutput, DataFlow
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.input_variants import InputVariants, signature_of
from gossamer.model.split.split_error import SplitArguments, in_words_of
from gossamer.model.split.split_points import SplitPoints, StageSpec
from gossamer.model.split.stage import StageModule
from gossamer.pipeline.p2p import StageTensor
from gossamer.run.batches import RankBatch
from gossamer.run.remote_teacher.frames import packed
from gossamer.run.remote_teacher.link import Patience, TeacherLink
from gossamer.run.remote_teacher.messages import Ask, BlockState, Border, Ready, TeacherPart, Terms
from gossamer.run.remote_teacher.states import States, bytes_per_row, counted, read, shapes_of
from gossamer.run.staged_model import boundary_of
from gossamer.spec.errors import WireMismatch, bad_input

TEACHER = SplitArguments(stages="--stage", cuts="--cuts", units="", whole="serve the teacher whole")
_MOST_TENSORS = 64  # of a frame
_MOST_KINDS = 256  # of batches whose data flow is kept
_KEY = "train.loss"
_TURN = threading.RLock()  # traces and stages of one process share the tensors without elements of torch


@dataclass(frozen=True, slots=True)
class Received:
    """What comes from the stage before: tensors of the forward, and the states of blocks that were asked for."""

    values: Mapping[CallOutput, Tensor] = field(default_factory=dict)
    states: States = field(default_factory=dict)


NOTHING = Received()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to come of a batch from the stage before. `rows`: of the states, one for each label that counts."""

    values: tuple[StageTensor, ...]
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a student's batches are read: its terms, and what of a batch goes into the forward; `beside`: what the
    states of blocks need of it more than that.
    """

    terms: Terms
    caller: ForwardAdapter
    names: tuple[str, ...]
    beside: tuple[str, ...]
    precision: Precision


@dataclass(frozen=True, slots=True)
class PlaceBefore:
    """The stage before. `where`: host and port; `part`: which stage it is; `digest`: of the weights up to it."""

    where: tuple[str, int]
    part: TeacherPart
    digest: str
    token: str
    patience: Patience


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherStage:
    """A stage of a teacher. `outline`: the whole model without memory, for traces; `before`: None of the first one."""

    part: TeacherPart
    stage: StageModule
    outline: nn.Module
    cuts: SplitPoints
    device: torch.device
    before: PlaceBefore | None = None
    _ways: dict[tuple[str, int], InputVariants] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Return whether this is the stage that students ask."""
        return self.part.stage == self.part.stages

    def way(self, reading: Reading, batch: Mapping[str, Tensor]) -> tuple[DataFlow, StageSpec]:
        """Return the data flow of a batch, and this stage in it; a new kind of batch costs a forward on shapes.

        Raises BadInput for a batch for which the model cannot be divided here.
        """
        batch = {name: one.to(self.device) for name, one in batch.items()}
        key = reading.terms.precision, reading.terms.dims
        if key not in self._ways:
            run = partial(_logits, reading.precision, self.device, reading.terms.dims)
            self._ways[key] = InputVariants(self.outline, run, self.cuts)
        with _TURN, in_words_of(TEACHER):
            if len(self._ways[key].known) >= _MOST_KINDS:
                self._ways[key].known.clear()
            flow, parts = self._ways[key].of(batch, training=False)
        mine = parts[self.part.stage - 1]
        if len(mine.sends) > _MOST_TENSORS:
            raise bad_input(
                wanted=f"at most {_MOST_TENSORS} tensors that cross from one stage of a teacher to the next",
                got=f"{len(mine.sends)} after {self.part.named}",
                do="set --cuts to a place between two blocks",
                key=_KEY,
            )
        return flow, mine

    def known(self, reading: Reading, batch: Mapping[str, Tensor]) -> tuple[DataFlow, StageSpec] | None:
        """Return the same, for a kind of batch that has come before; None for another one. For any thread."""
        ways = self._ways.get((reading.terms.precision, reading.terms.dims))
        found = None if ways is None else ways.known.get((False, signature_of(batch)))
        return None if found is None else (found[0], found[1][self.part.stage - 1])

    def blocks(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Return those blocks, of these, that run on this stage."""
        part = self.stage.part
        mine = {call.unit for call in self.stage.flow.calls[part.low : part.high]}
        return tuple(one for one in asked if one in mine)

    @torch.no_grad()
    def forward(self, reading: Reading, batch: Mapping[str, Tensor], received: Received) -> InFlight:
        """Run this stage's part of the forward of a batch; on the last stage the result is the logits."""
        way = self.way(reading, batch)
        there = {name: one.to(self.device) for name, one in batch.items()}
        run = partial(_logits, reading.precision, self.device, reading.terms.dims, self.stage.module, there)
        with _TURN, in_words_of(TEACHER):
            self.stage.follow(*way)
            return self.stage.forward(run, {value: one.to(self.device) for value, one in received.values.items()})


class StageBefore:
    """One student's connection to the stage before, for the stage `mine`."""

    def __init__(self, place: PlaceBefore, mine: TeacherPart) -> None:
        self._place, self._mine = place, mine
        self._link = before_link(place.where, place.part, token=place.token, patience=place.patience)
        self._numbers = count()
        self._terms: Terms | None = None
        self._states: tuple[BlockState, ...] = ()

    def agree(self, terms: Terms, example: Mapping[str, Tensor]) -> Ready:
        """Say what is wanted, with a first batch. Raises BadInput, TeacherLost, WireMismatch."""
        check_before(self._link, self._mine)
        if self._link.facts.digest != self._place.digest:
            raise WireMismatch(
                f"{self._place.part.named} at {self._link.where} has other weights now ({self._link.facts.digest}, "
                f"before {self._place.digest}): start {self._mine.named} again too"
            )
        self._terms = terms.model_copy(update={"part": self._mine, "wants_head": False})
        ready, _ = self._link.agree(self._terms, example)
        if strange := [one.block for one in ready.states if one.block not in terms.blocks]:
            raise WireMismatch(f"{self._place.part.named} at {self._link.where} offers states of {strange}")
        self._states = ready.states
        return ready

    def ask(self, batch: Mapping[str, Tensor], wanted: Wanted) -> int:
        """Ask for what this stage receives of a batch; return the number of the question."""
        number = next(self._numbers)
        most = sum(_nbytes(one) for one in wanted.values) + wanted.rows * bytes_per_row(self._states)
        rows = next(iter(batch.values())).shape[0]
        self._link.ask(number, packed(Ask(number=number), batch), rows=rows, most_bytes=most)
        return number

    def take(self, number: int, wanted: Wanted) -> Received:
        """Wait for an answer and return it. Raises BadInput, TeacherLost, WireMismatch."""
        _, tensors = self._link.take(number)
        assert self._terms is not None
        shapes = {_name(one.value): (tuple(one.form.shape), one.form.dtype) for one in wanted.values}
        shapes |= shapes_of(self._states, self._terms, wanted.rows)
        if (came := {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}) != shapes:
            raise WireMismatch(
                f"{self._place.part.named} at {self._link.where} sent other tensors than {self._mine.named} receives: "
                f"wanted {shapes}, got {came}"
            )
        states = read(tensors, self._states, self._terms, wanted.rows, torch.device("cpu"))
        return Received({one.value: tensors[_name(one.value)] for one in wanted.values}, states or {})

    def give_up(self) -> None:
        """Wake up whoever waits for an answer."""
        self._link.give_up("this stage ends")

    def close(self) -> None:
        """End the connection."""
        self._link.close()


def before_link(
    where: tuple[str, int], part: TeacherPart, *, token: str, patience: Patience, key: str = _KEY
) -> TeacherLink:
    """Return a connection to the stage `part`. `key`: what names its address. Raises TeacherAbsent, BadInput."""
    return TeacherLink(*where, token=token, patience=patience, whose=part.named, kind=Border, key=key)


def check_before(link: TeacherLink, mine: TeacherPart, *, key: str = _KEY) -> None:
    """Raise BadInput unless the stage before the one that is `mine` is at the other end of a connection."""
    wanted = mine.model_copy(update={"stage": mine.stage - 1})
    if (found := link.facts.part) is None:
        raise bad_input(
            wanted=f"{wanted.named} at {link.where}, as {mine.named} asks it",
            got="a teacher that is whole",
            do=f"start it with --stage {wanted.stage}/{wanted.stages}",
            key=key,
        )
    _check_equal(wanted, found, f"at {link.where}", key)


def check_asked(mine: TeacherPart | None, terms: Terms) -> None:
    """Raise BadInput unless who asks a teacher, or its stage `mine`, may do so.

    The last stage and a whole teacher are asked by students, every other stage by the next one of the same teacher.
    """
    asks = terms.part
    if asks is None:
        if mine is not None and mine.stage < mine.stages:
            raise bad_input(
                wanted=f"the address of the teacher's last stage, {mine.stages} of {mine.stages}, whom students ask",
                got=f"that of {mine.named}",
                do="name the last stage's address as the teacher",
                key=_KEY,
            )
    elif mine is None or mine.stage == mine.stages:
        named = "a teacher that is whole" if mine is None else mine.named
        raise bad_input(
            wanted=f"students of {named}",
            got=asks.named,
            do="give that stage the address of the one before it, with --previous",
            key=_KEY,
        )
    else:
        _check_equal(mine.model_copy(update={"stage": mine.stage + 1}), asks, f"for {mine.named}", _KEY)


def _check_equal(wanted: TeacherPart, found: TeacherPart, where: str, key: str) -> None:
    if (found.stage, found.stages) != (wanted.stage, wanted.stages):
        raise bad_input(
            wanted=f"{wanted.named} {where}",
            got=found.named,
            do="number the stages from 1 with --stage, and give each the address of the one before with --previous",
            key=key,
        )
    for same, ours, theirs, do in (
        ("teacher", wanted.source, found.source, "give every stage the same files"),
        ("cuts", ", ".join(wanted.cuts), ", ".join(found.cuts), "give every stage the same --cuts, or none"),
    ):
        if theirs != ours:
            raise bad_input(wanted=f"the same {same} in all stages, {ours}", got=f"{theirs} {where}", do=do, key=key)


def received_by(way: tuple[DataFlow, StageSpec], terms: Terms, batch: Mapping[str, Tensor]) -> Wanted:
    """Return what a stage receives from the one before, of a question."""
    ids = batch["input_ids"]
    labels = ids.numel() if terms.dims > 2 else len(ids)
    valid = counted(batch, labels)
    return Wanted(boundary_of(*way).receives, labels if valid is None else len(valid))


def sent_by(live: InFlight) -> RankBatch:
    """Return what a stage sends to the next one, by the names of a frame's tensors."""
    return {_name(value): one.detach() for value, one in live.sent.items()}


def _name(value: CallOutput) -> str:
    return f"{value.call}.{value.place}"


def _nbytes(one: StageTensor) -> int:
    return torch.Size(one.form.shape).numel() * one.form.dtype.itemsize


def _logits(
    precision: Precision, device: torch.device, dims: int, module: nn.Module, batch: Mapping[str, Tensor]
) -> Tensor:
    rows = dict(batch)
    with precision.autocast(device):
        return logits_of(caller_of(module, rows)(module, rows), dims=dims, shape="of the teacher")
