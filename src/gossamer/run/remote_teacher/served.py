"""A teacher that answers students, whole or as one of its stages: terms are tried, then questions are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.precision import precision_of
from gossamer.model.side_effects import untouched
from gossamer.ops.tiled_logits import HeadRows
from gossamer.run.engine import check_isolates
from gossamer.run.remote_teacher.messages import Border, Facts, Ready, Rows, Terms
from gossamer.run.remote_teacher.stage import NOTHING, Reading, Received, TeacherStage, sent_by
from gossamer.run.remote_teacher.teacher import VALID
from gossamer.run.teacher import KnownWords, Teacher, head_rows, most_probable, watched
from gossamer.saver._unmade_logits import ChangedInPlaceError
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
        caller = caller_of(self.module, list(example))
        if terms.isolates:
            check_isolates(self.module, caller, "of the teacher ")
        names = [
            name
            for name in example
            if name == "input_ids" or name in caller.takes or (caller.takes_all and name.isidentifier())
        ]
        return Reading(terms=terms, caller=caller, names=tuple(names), precision=precision_of(terms.precision))

    def ready(
        self, reading: Reading, example: Mapping[str, Tensor], received: Received = NOTHING
    ) -> tuple[Ready, Mapping[str, Tensor]]:
        """Try a student's terms on its first batch; return the consent and the tensors of the head.

        Raises BadInput for terms that the teacher cannot keep.
        """
        terms, rows = reading.terms, self.asked(reading, example)
        if not self.is_last:
            self._border(reading, rows, received)
            return Ready(width=0, hidden=0, compute="", names=reading.names), {}
        found = self._tried(reading, rows, received)
        if terms.top_k:
            _known(found.chosen(torch.zeros(0, dtype=torch.int64, device=self.device)), terms)
            return Ready(width=found.width, hidden=0, compute="", names=reading.names), {}
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
        return Ready(width=width, hidden=hidden, compute=str(compute), names=reading.names), sent

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
        given = self.asked(reading, batch)
        if not self.is_last:
            return Border(number=number), self._border(reading, given, received)
        rows = self._rows(reading, given, received)
        if VALID in batch:
            rows = rows.chosen(_valid(batch[VALID], rows.hidden.shape[0]).to(self.device))
        map = rows.map
        said = Rows(number=number, inner=map.inner, is_capped=map.is_capped, outer=map.outer)
        if not reading.terms.top_k:
            if rows.weight is None:
                raise WireMismatch("wanted logits from the teacher's head, got others than in the first batch")
            return said, {"hidden": rows.hidden.to(rows.compute or rows.hidden.dtype)}
        known = _known(rows, reading.terms)
        return said, {"words": known.words, "log_probabilities": known.log_probabilities}

    def _tried(self, reading: Reading, example: Mapping[str, Tensor], received: Received) -> HeadRows:
        with untouched(self.module):
            try:
                return self._rows(reading, example, received)
            except ChangedInPlaceError:
                self.close()
                self._without = "it changes its logits in place"
                return self._rows(reading, example, received)

    def _border(self, reading: Reading, batch: Mapping[str, Tensor], received: Received) -> Mapping[str, Tensor]:
        assert self.stage is not None
        return sent_by(self.stage.forward(reading, batch, received))

    @torch.no_grad()
    def _rows(self, reading: Reading, batch: Mapping[str, Tensor], received: Received) -> HeadRows:
        if self.stage is not None:
            made = head_rows(self.stage.forward(reading, batch, received).result)
            return replace(made, words=reading.terms.words)
        teacher = Teacher(module=self.module, caller=reading.caller, parameters=self.facts.parameters)
        with reading.precision.autocast(self.device):
            there = {name: one.to(self.device) for name, one in batch.items()}
            return replace(teacher.rows(there, reading.terms.dims), words=reading.terms.words)

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


def _valid(bits: Tensor, count: int) -> Tensor:
    if bits.dtype is not torch.uint8 or bits.ndim != 1 or bits.numel() != -(-count // 8):
        raise WireMismatch(f"wanted {-(-count // 8)} bytes that say which of {count} tokens count, got {bits.numel()}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=count)).nonzero().squeeze(1)
