"""The server of a teacher: one listening socket, a thread for each student, and one that computes for all of them."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.precision import Precision, precision_of
from gossamer.model.side_effects import untouched
from gossamer.ops.tiled_logits import HeadRows
from gossamer.run.engine import check_isolates
from gossamer.run.remote_teacher.frames import FrameSocket, packed
from gossamer.run.remote_teacher.messages import (
    PROTOCOL,
    Ask,
    Challenge,
    Facts,
    Hello,
    Ready,
    Refusal,
    Rows,
    Terms,
    Welcome,
    signed,
)
from gossamer.run.remote_teacher.teacher import VALID
from gossamer.run.teacher import KnownWords, Teacher, most_probable, watched
from gossamer.saver._unmade_logits import ChangedInPlaceError
from gossamer.spec.errors import BadInput, RunFailed, WireMismatch, bad_input

_GREET_S, _SEND_S, _TURN_S = 10.0, 120.0, 0.25
_MOST_BYTES = 1 << 28  # of a question's tensors
_KEY = "train.loss"
T = TypeVar("T")


@dataclass(slots=True)
class Served:
    """What a server has done."""

    students: int = 0
    questions: int = 0
    tokens: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    """The terms of one student."""

    terms: Terms
    caller: ForwardAdapter
    names: tuple[str, ...]
    precision: Precision


class ServedTeacher:
    """A teacher that answers students: frozen, in evaluation mode, on `device`."""

    def __init__(self, module: nn.Module, facts: Facts, device: torch.device) -> None:
        self.module = module.eval().requires_grad_(False).to(device)
        self.facts, self.device = facts, device
        self._undo, self._without = watched(self.module)

    def agreed(self, terms: Terms, example: Mapping[str, Tensor]) -> tuple[_Agreed, Ready, Mapping[str, Tensor]]:
        """Try a student's terms on its first batch; return them, the consent and the tensors of the head.

        Raises BadInput for terms that the teacher cannot keep.
        """
        caller = caller_of(self.module, list(example))
        if terms.isolates:
            check_isolates(self.module, caller, "of the teacher ")
        names = [
            name
            for name in example
            if name == "input_ids" or name in caller.takes or (caller.takes_all and name.isidentifier())
        ]
        agreed = _Agreed(terms=terms, caller=caller, names=tuple(names), precision=precision_of(terms.precision))
        with untouched(self.module):
            try:
                rows = self._rows(agreed, example)
            except ChangedInPlaceError:
                self._undo()
                self._without = "it changes its logits in place"
                rows = self._rows(agreed, example)
        if terms.top_k:
            _known(rows.chosen(torch.zeros(0, dtype=torch.int64, device=self.device)), terms)
            return agreed, Ready(width=rows.width, hidden=0, compute="", names=agreed.names), {}
        if rows.weight is None:
            raise bad_input(
                wanted="a teacher whose logits come from one nn.Linear, whose hidden states can be sent",
                got=self._without or "one whose head is not what gives them",
                do="set top_k, so that its most probable words are sent",
                key=_KEY,
            )
        compute = rows.compute or rows.hidden.dtype
        head = {"weight": rows.weight} if rows.bias is None else {"weight": rows.weight, "bias": rows.bias}
        sent = {name: one.to(compute) for name, one in head.items()} if terms.wants_head else {}
        width, hidden = rows.weight.shape
        return agreed, Ready(width=width, hidden=hidden, compute=str(compute), names=agreed.names), sent

    def answer(self, agreed: _Agreed, number: int, batch: Mapping[str, Tensor]) -> tuple[Rows, Mapping[str, Tensor]]:
        """Return the answer to a question. Raises WireMismatch, BadInput."""
        if missing := [name for name in agreed.names if name not in batch]:
            raise WireMismatch(f"wanted a batch with {', '.join(agreed.names)}, got none of {', '.join(missing)}")
        rows = self._rows(agreed, {name: batch[name] for name in agreed.names})
        if VALID in batch:
            rows = rows.chosen(_valid(batch[VALID], rows.hidden.shape[0]).to(self.device))
        map = rows.map
        said = Rows(number=number, inner=map.inner, is_capped=map.is_capped, outer=map.outer)
        if not agreed.terms.top_k:
            if rows.weight is None:
                raise WireMismatch("wanted logits from the teacher's head, got others than in the first batch")
            return said, {"hidden": rows.hidden.to(rows.compute or rows.hidden.dtype)}
        known = _known(rows, agreed.terms)
        return said, {"words": known.words, "log_probabilities": known.log_probabilities}

    @torch.no_grad()
    def _rows(self, agreed: _Agreed, batch: Mapping[str, Tensor]) -> HeadRows:
        teacher = Teacher(module=self.module, caller=agreed.caller, parameters=self.facts.parameters)
        with agreed.precision.autocast(self.device):
            there = {name: one.to(self.device) for name, one in batch.items()}
            return replace(teacher.rows(there, agreed.terms.dims), words=agreed.terms.words)

    def close(self) -> None:
        """Give the module's head its own forward back."""
        self._undo()


def _known(rows: HeadRows, terms: Terms) -> KnownWords:
    return most_probable(rows, terms.top_k, temperature=terms.temperature, tile=terms.tile_tokens)


def _valid(bits: Tensor, count: int) -> Tensor:
    if bits.dtype is not torch.uint8 or bits.ndim != 1 or bits.numel() != -(-count // 8):
        raise WireMismatch(f"wanted {-(-count // 8)} bytes that say which of {count} tokens count, got {bits.numel()}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=count)).nonzero().squeeze(1)


@dataclass(slots=True, kw_only=True)
class TeacherServer:
    """A server on a listening socket. `clients`: students at a time, at most; `tell`: takes lines for the user."""

    teacher: ServedTeacher
    listener: socket.socket
    token: str
    clients: int = 64
    tell: Callable[[str], None] = lambda said: None
    done: Served = field(default_factory=Served)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _links: dict[FrameSocket, threading.Thread] = field(default_factory=dict)
    _computer: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="gossamer-teach")
    )

    def serve(self) -> None:
        """Serve students until `stop`, or an exception in this thread; then end all connections."""
        try:
            while not self._stopping.is_set():
                self.listener.settimeout(_TURN_S)
                with suppress(TimeoutError, ConnectionError):  # no student, or one that has left
                    connection, (host, *_) = self.listener.accept()
                    self._begin(FrameSocket(connection), host)
        finally:
            self.stop()
            self.listener.close()
            with self._lock:
                links = dict(self._links)
            for link in links:
                link.close()
            for thread in links.values():
                thread.join()
            self._computer.shutdown()
            self.teacher.close()

    def stop(self) -> None:
        """Let `serve` return."""
        self._stopping.set()

    def _begin(self, link: FrameSocket, host: str) -> None:
        with self._lock:
            self._links = {one: thread for one, thread in self._links.items() if thread.is_alive()}
            is_full = len(self._links) >= self.clients
            if not is_full:
                thread = threading.Thread(target=self._student, args=(link, host), name="gossamer-student", daemon=True)
                self._links[link] = thread
                thread.start()
        if is_full:
            said = f"wanted at most {self.clients} students at a time: raise --clients"
            with suppress(OSError):
                link.send(packed(Refusal(message=said)), within_s=_TURN_S)
            link.close()

    def _student(self, link: FrameSocket, host: str) -> None:
        try:
            agreed = self._greeted(link)
            with self._lock:
                self.done.students += 1
                number = self.done.students
            kind = f"its {agreed.terms.top_k} most probable words" if agreed.terms.top_k else "rows of hidden states"
            self.tell(f"student {number} at {host} asks for {kind}")
            try:
                while not self._stopping.is_set():
                    asked, batch = link.receive(Ask, within_s=None, limit_bytes=_MOST_BYTES)
                    self._answered(link, agreed, asked.number, batch)
            finally:
                self.tell(f"student {number} at {host} left")
        except (BadInput, RunFailed) as error:
            is_input, message = isinstance(error, BadInput), str(error).removeprefix(f"{_KEY}: ")
            with suppress(OSError):
                link.send(packed(Refusal(message=message[:4000], is_input=is_input)), within_s=_TURN_S)
            self.tell(f"a student at {host} was refused: {message}")
        except OSError:  # it left, or the server ends
            pass
        finally:
            link.close()

    def _greeted(self, link: FrameSocket) -> _Agreed:
        nonce = secrets.token_hex(32)
        link.send(packed(Challenge(nonce=nonce)), within_s=_GREET_S)
        hello, _ = link.receive(Hello, within_s=_GREET_S)
        if hello.protocol != PROTOCOL:
            raise BadInput(f"wanted protocol {PROTOCOL}, got {hello.protocol}: install one version on both hosts")
        if not hmac.compare_digest(hello.proof, signed(self.token, "student", nonce, hello.nonce)):
            raise bad_input(
                wanted="the secret of this teacher",
                got="another one" if self.token else "one where it has none",
                do="set GOSSAMER_TEACHER_TOKEN to the same text where the teacher and where the students are",
            )
        link.send(packed(Welcome(proof=signed(self.token, "teacher", nonce, hello.nonce))), within_s=_GREET_S)
        link.send(packed(self.teacher.facts), within_s=_GREET_S)
        terms, example = link.receive(Terms, within_s=None, limit_bytes=_MOST_BYTES)
        agreed, ready, head = self._compute(lambda: self.teacher.agreed(terms, example))
        link.send(packed(ready, head), within_s=_SEND_S)
        return agreed

    def _answered(self, link: FrameSocket, agreed: _Agreed, number: int, batch: Mapping[str, Tensor]) -> None:
        said, tensors = self._compute(lambda: self.teacher.answer(agreed, number, batch))
        data = packed(said, tensors)
        link.send(data, within_s=_SEND_S)
        with self._lock:
            self.done.questions += 1
            self.done.tokens += next(iter(tensors.values())).shape[0]
            self.done.sent_bytes += len(data)

    def _compute(self, work: Callable[[], T]) -> T:
        """Return what `work` does, in the thread that computes. Raises RunFailed for what a model raises."""
        try:
            return self._computer.submit(work).result()
        except (BadInput, RunFailed):
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise RunFailed(f"the teacher cannot compute this batch ({said})") from error
