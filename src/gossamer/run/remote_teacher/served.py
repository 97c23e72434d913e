"""A teacher that answers students, whole or as one of its stages: terms are tried, then questions are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.precision import precision_of
from gossamer.model.side_effects import untouched
from gossamer.ops.tiled_logits import HeadRows
from gossamer.run.engine import check_isolates
from gossamer.run.remote_teacher.experts import ServedExperts
from gossamer.run.remote_teacher.messages import Border, Facts, Ready, Rows, Terms
from gossamer.run.remote_teacher.stage import NOTHING, Reading, Received, TeacherStage, sent_by
from gossamer.run.remote_teacher.states import (
    States,
    asked_beside,
    check_blocks,
    counted,
    described,
    named,
    rows_of,
    tapped,
)
from gossamer.run.teacher import KnownWords, Teacher, head_rows, most_probable, watched
from gossamer.saver.head.unmade_logits import ChangedInPlaceError
from gossamer.spec.errors import WireMismatch, bad_input

_KEY = "train.loss"


class ServedTeacher:
    """A teacher that answers students: frozen, in evaluation mode, on `device`. `stage`: None of a whole one."""

    def __init__(
        self, module: nn.Module, facts: Facts, device: torch.device, stage: TeacherStage | None = None
    ) -> None:
        self.module = module.eval().requires_grad_(False).to(device)
        self.facts, self.device, self.stage = facts, device, stage
        self._undo, self._without = _nothing, ""
        self._words = _words_of(self.module if stage is None else stage.outline)
        if self.is_last:
            self._undo, self._without = watched(self.module, is_declared=stage is not None)

    @property
    def is_last(self) -> bool:
        """Return whether students are answered here, and no next stage."""
        return self.stage is None or self.stage.is_last

    def reading(self, terms: Terms, example: Mapping[str, Tensor]) -> Reading:
        """Return how a student's batches are read. Raises BadInput for documents that would not be kept apart."""
        check_blocks(terms, self.facts)
        if terms.experts and self.stage is not None:
            raise bad_input(
                wanted="a teacher that is whole, for expert_distillation",
                got=self.stage.part.named,
                do="serve it without --stage, or give its folder",
                key=_KEY,
            )
        caller = caller_of(self.module, list(example))
        if terms.isolates:
            check_isolates(self.module, caller, "of the teacher ")
        names = [
            name
            for name in example
            if name == "input_ids" or name in caller.takes or (caller.takes_all and name.isidentifier())
        ]
        return Reading(
            terms=terms,
            caller=caller,
            names=tuple(names),
            beside=tuple(one for one in asked_beside(terms, example) if one not in names),
            precision=precision_of(terms.precision),
        )

    def ready(
        self, reading: Reading, example: Mapping[str, Tensor], received: Received = NOTHING
    ) -> tuple[Ready, Mapping[str, Tensor]]:
        """Try a student's terms on its first batch; return the consent and the tensors of the head.

        Raises BadInput for terms that the teacher cannot keep.
        """
        terms, names = reading.terms, (*reading.names, *reading.beside)
        if terms.experts:
            return ServedExperts(self.module, self.device).ready(terms), {}
        if not self.is_last:
            _, states = self._border(reading, example, received)
            return Ready(width=0, hidden=0, compute="", names=names, states=described(states, terms)), {}
        found, states = self._tried(reading, example, received)
        if missing := [one for one in terms.blocks if one not in states]:
            raise bad_input(
                wanted="blocks that run as a whole on one stage of the teacher",
                got=f"{', '.join(missing)}, whose modules are divided",
                do="set --cuts to places between blocks",
                key=_KEY,
            )
        for path, one in states.items():
            if len(one) != len(found.hidden):
                raise bad_input(
                    wanted="hidden states (batch, sequence, width), of the tokens of the batch",
                    got=f"{len(one)} rows of {path} of the teacher, with {len(found.hidden)} labels",
                    do="use the distillation of outputs alone",
                    key=_KEY,
                )
        sizes = described(states, terms)
        if terms.top_k:
            _known(found.chosen(torch.zeros(0, dtype=torch.int64, device=self.device)), terms)
            return Ready(width=found.width, hidden=0, compute="", names=names, states=sizes), {}
        if found.weight is None:
            raise bad_input(
                wanted="a teacher whose logits come from one nn.Linear, whose hidden states can be sent",
                got=self._without or "one whose head is not what gives them",
                do="set top_k, so that its most probable words are sent",
                key=_KEY,
            )
        compute = found.compute or found.hidden.dtype
        head = {"weight": found.weight} if found.bias is None else {"weight": found.weight, "bias": found.bias}
        sent = {name: one.to(compute) for name, one in head.items()} if terms.wants_head else {}
        width, hidden = found.weight.shape
        return Ready(width=width, hidden=hidden, compute=str(compute), names=names, states=sizes), sent

    def asked(self, reading: Reading, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what of a question goes into the forward. Raises WireMismatch for one that has less, and for tokens
        that the teacher does not have: on a GPU these would end it for all students.
        """
        if missing := [name for name in reading.names if name not in batch]:
            raise WireMismatch(f"wanted a batch with {', '.join(reading.names)}, got none of {', '.join(missing)}")
        if (ids := batch.get("input_ids")) is not None and self._words is not None:
            _check_tokens(ids, self._words)
        return {name: batch[name] for name in reading.names}

    def answer(
        self, reading: Reading, number: int, batch: Mapping[str, Tensor], received: Received = NOTHING
    ) -> tuple[Rows | Border, Mapping[str, Tensor]]:
        """Return the answer to a question. `received`: from the stage before. Raises WireMismatch, BadInput."""
        if reading.terms.experts:
            return Rows(number=number), ServedExperts(self.module, self.device).outputs(reading, batch)
        if not self.is_last:
            sent, states = self._border(reading, batch, received)
            return Border(number=number), {**sent, **named(states, reading.terms)}
        rows, states = self._rows(reading, batch, received)
        beside = named(states, reading.terms)
        if (valid := counted(batch, rows.hidden.shape[0])) is not None:
            rows = rows.chosen(valid.to(self.device))
        map = rows.map
        said = Rows(number=number, inner=map.inner, is_capped=map.is_capped, outer=map.outer)
        if not reading.terms.top_k:
            if rows.weight is None:
                raise WireMismatch("wanted logits from the teacher's head, got others than in the first batch")
            return said, {"hidden": rows.hidden.to(rows.compute or rows.hidden.dtype), **beside}
        known = _known(rows, reading.terms)
        return said, {"words": known.words, "log_probabilities": known.log_probabilities, **beside}

    def _tried(self, reading: Reading, example: Mapping[str, Tensor], received: Received) -> tuple[HeadRows, States]:
        with untouched(self.module):
            try:
                return self._rows(reading, example, received)
            except ChangedInPlaceError:
                self.close()
                self._without = "it changes its logits in place"
                return self._rows(reading, example, received)

    def _border(
        self, reading: Reading, batch: Mapping[str, Tensor], received: Received
    ) -> tuple[Mapping[str, Tensor], States]:
        """Return what the next stage receives, and the states of blocks up to this stage."""
        assert self.stage is not None
        given, terms = self.asked(reading, batch), reading.terms
        with tapped(self.module, self.stage.blocks(terms.blocks)) as taps:
            sent = sent_by(self.stage.forward(reading, given, received))
            return sent, {**received.states, **rows_of(taps, terms, batch)}

    @torch.no_grad()
    def _rows(self, reading: Reading, batch: Mapping[str, Tensor], received: Received) -> tuple[HeadRows, States]:
        """Return the rows of the logits, of all labels, and those of the states, of the labels that count."""
        given, terms = self.asked(reading, batch), reading.terms
        here = terms.blocks if self.stage is None else self.stage.blocks(terms.blocks)
        with tapped(self.module, here) as taps:
            if self.stage is not None:
                made = head_rows(self.stage.forward(reading, given, received).result)
            else:
                teacher = Teacher(module=self.module, caller=reading.caller, parameters=self.facts.parameters)
                with reading.precision.autocast(self.device):
                    made = teacher.rows({name: one.to(self.device) for name, one in given.items()}, terms.dims)
            states = {**received.states, **rows_of(taps, terms, batch)}
        return replace(made, words=terms.words), states

    def close(self) -> None:
        """Give the module's head its own forward back."""
        self._undo()


def _nothing() -> None:
    pass


def _words_of(module: nn.Module) -> int | None:
    """Return the number of words that a model looks up, None where it declares no table of them."""
    try:
        table = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _check_tokens(ids: Tensor, words: int) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise WireMismatch(f"wanted input_ids of integers, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < words:
        raise WireMismatch(f"wanted tokens from 0 to {words - 1:,}, got {int(ids.min()):,} to {int(ids.max()):,}")


def _known(rows: HeadRows, terms: Terms) -> KnownWords:
    return most_probable(rows, terms.top_k, temperature=terms.temperature, tile=terms.tile_tokens)
