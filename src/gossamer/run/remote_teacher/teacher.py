"""A teacher on another host, as the loss of a student sees it: asked when a batch is drawn, read when its loss is due.

Drawn batches hold the ticket of their question. Whatever has no ticket that fits (rows of a batch, a step that is
tried again, a micro-batch that is computed again) is asked for when its loss is due: the answer is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.loss import IGNORE
from gossamer.loss.inputs.labels import targets
from gossamer.model.python_state.random_generators import generator_states, generators_kept
from gossamer.ops.cut_cross_entropy import LogitMap
from gossamer.ops.tiled_logits import HeadRows
from gossamer.run.batches import Batches, RankBatch, WidenedBatches
from gossamer.run.remote_teacher.frames import packed
from gossamer.run.remote_teacher.link import TeacherLink
from gossamer.run.remote_teacher.messages import Ask, Ready, Rows, Terms
from gossamer.run.remote_teacher.states import VALID, SentStates, bytes_per_row, read
from gossamer.run.teacher import KnownWords, TeacherElsewhere
from gossamer.spec.errors import WireMismatch

TICKET = "loss.teacher_ticket"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteTeacher(TeacherElsewhere):
    """A teacher that has consented to `terms`. `head`: its head on the student's device, where rows of hidden states
    come; without one its words come. `states`: of the blocks that `terms` names, in the newest answer.
    """

    link: TeacherLink
    terms: Terms
    ready: Ready
    device: torch.device
    head: HeadRows | None = None
    states: SentStates = field(default_factory=SentStates)
    _ahead: count[int] = field(default_factory=count)
    _now: count[int] = field(default_factory=lambda: count(-1, -1))

    @classmethod
    def of(cls, link: TeacherLink, terms: Terms, example: RankBatch, device: torch.device) -> RemoteTeacher:
        """Come to an agreement with the teacher at the other end. `example`: the first rows.

        Raises BadInput, TeacherLost, WireMismatch.
        """
        ready, tensors = link.agree(terms, given(example))
        if not set(ready.names) <= set(given(example)):
            raise WireMismatch(f"the teacher at {link.where} asks for {ready.names}, which no batch has")
        if tuple(one.block for one in ready.states) != terms.blocks:
            raise WireMismatch(f"the teacher at {link.where} offers states of other blocks than {terms.blocks}")
        if terms.top_k:
            return cls(link=link, terms=terms, ready=ready, device=device)
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or tuple(weight.shape) != (ready.width, ready.hidden) or not weight.is_floating_point():
            raise WireMismatch(f"the teacher at {link.where} sent no head of {ready.width:,} words")
        if bias is not None and (tuple(bias.shape) != (ready.width,) or bias.dtype is not weight.dtype):
            raise WireMismatch(f"the teacher at {link.where} sent a head with a bias of another shape")
        head = HeadRows(
            hidden=weight.new_zeros(0, ready.hidden, device=device),
            weight=weight.to(device),
            bias=None if bias is None else bias.to(device),
            compute=weight.dtype,
        )
        return cls(link=link, terms=terms, ready=ready, device=device, head=head)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes that come for a token."""
        states = bytes_per_row(self.ready.states)
        if self.head is None:
            return 8 * self.terms.top_k + 4 + states
        assert self.head.weight is not None
        return self.ready.hidden * self.head.weight.element_size() + states

    def ask(self, batch: Mapping[str, Tensor]) -> RankBatch:
        """Ask for a batch's rows; return the batch with the ticket of the question."""
        number, rows = next(self._ahead), batch["labels"].shape[0]
        self._send(number, batch)
        ticket = torch.stack([torch.full((rows,), number), torch.arange(rows)], 1)
        return {**batch, TICKET: ticket}

    def answer(self, batch: Mapping[str, Tensor], valid: Tensor) -> HeadRows | KnownWords:
        number = self._ticket(batch)
        if number is None:
            number = next(self._now)
            self._send(number, batch)
        said, tensors = self.link.take(number)
        assert isinstance(said, Rows)
        return self._read(said, tensors, valid.numel())

    def _send(self, number: int, batch: Mapping[str, Tensor]) -> None:
        counts = targets(batch).cpu() != IGNORE
        tensors = {name: batch[name] for name in self.ready.names}
        if not counts.all():
            tensors[VALID] = torch.from_numpy(np.packbits(counts.numpy()))
        most = int(counts.sum()) * self.bytes_per_token
        data = packed(Ask(number=number), tensors)
        self.link.ask(number, data, rows=batch["labels"].shape[0], most_bytes=most)

    def _ticket(self, batch: Mapping[str, Tensor]) -> int | None:
        """Return the number of the question that was asked for exactly these rows; None if there is none."""
        ticket = batch.get(TICKET)
        if ticket is None or not len(ticket):
            return None
        numbers, rows = ticket.cpu().unbind(1)
        number = int(numbers[0])
        fits = bool((numbers == number).all()) and torch.equal(rows, torch.arange(len(rows)))
        return number if fits and self.link.has(number, len(rows)) else None

    def _read(self, said: Rows, tensors: Mapping[str, Tensor], wanted: int) -> HeadRows | KnownWords:
        states = read(tensors, self.ready.states, self.terms, wanted, self.device)
        if states is None:
            raise self._garbage(wanted)
        self.states.hold(states)
        if self.head is not None:
            hidden = tensors.get("hidden")
            if (
                hidden is None
                or tuple(hidden.shape) != (wanted, self.ready.hidden)
                or hidden.dtype is not self.head.compute
            ):
                raise self._garbage(wanted)
            map = LogitMap(inner=said.inner, is_capped=said.is_capped, outer=said.outer)
            return replace(self.head, hidden=hidden.to(self.device), map=map)
        k, words, known = self.terms.top_k, tensors.get("words"), tensors.get("log_probabilities")
        shapes = [None if one is None else (tuple(one.shape), one.dtype) for one in (words, known)]
        if words is None or known is None or shapes != [((wanted, k), torch.int64), ((wanted, k + 1), torch.float32)]:
            raise self._garbage(wanted)
        if wanted and (int(words.min()) < 0 or int(words.max()) >= self.ready.width):
            raise self._garbage(wanted)
        return KnownWords(words.to(self.device), known.to(self.device))

    def _garbage(self, wanted: int) -> WireMismatch:
        return WireMismatch(f"the teacher at {self.link.where} sent other tensors than those of {wanted:,} tokens")


class RemoteTeacherBatches(WidenedBatches):
    """Batches for which the teacher is asked as they are drawn, or announced.

    Items that draw from the default generators are not read ahead: a checkpoint between reading and use would have the
    generators after it, and a resumed run would draw others. The first ones are put back, and read when it is their
    turn.
    """

    def __init__(self, inner: Batches, teacher: RemoteTeacher) -> None:
        super().__init__(inner)
        self.is_announced = True
        self._teacher = teacher
        self._announced: tuple[bytes, RankBatch] | None = None

    def batch(self, indices: np.ndarray[Any, Any]) -> RankBatch:
        key, ahead = np.asarray(indices, np.int64).tobytes(), self._announced
        if ahead is not None and ahead[0] == key:
            self._announced = None
            return ahead[1]
        return self._teacher.ask(self.inner.batch(indices))

    def announce(self, indices: np.ndarray[Any, Any]) -> None:
        key = np.asarray(indices, np.int64).tobytes()
        if self._announced is not None and self._announced[0] == key:
            return
        with generators_kept():
            before, rows = generator_states(), self.inner.batch(indices)
            self.is_announced = generator_states() == before
        if self.is_announced:
            self._announced = key, self._teacher.ask(rows)


def given(batch: Mapping[str, Tensor]) -> RankBatch:
    """Return what a teacher may see of a batch: no labels, and nothing that is for the loss alone."""
    return {name: one for name, one in batch.items() if name != "labels" and not name.startswith("loss.")}
