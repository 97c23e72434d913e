"""A student's connection to a teacher on another host: questions go out ahead, answers are there when the loss is.

One thread, `gossamer-teacher`, holds the connection. A question waits in a queue until fewer than `AHEAD` answers are
on their way or not taken yet, so that the teacher computes the next micro-batch while the student computes this one,
and no more than that is ever held. What is asked for now goes first, whatever is ahead.

A connection that breaks is opened again, and what has no answer is asked again: the teacher must be the one it was.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from gossamer.run.remote_teacher.frames import FrameReader, FrameSocket, expected, packed
from gossamer.run.remote_teacher.messages import (
    PROTOCOL,
    Border,
    Challenge,
    Facts,
    Hello,
    Ready,
    Rows,
    Terms,
    Welcome,
    signed,
)
from gossamer.spec.errors import BadInput, RunFailed, TeacherLost, WireMismatch, bad_input

AHEAD = 2
_CONNECT_S, _SAY_S, _TURN_S = 10.0, 10.0, 0.5
_HEAD_BYTES = 1 << 36
_PIECE = 1 << 20
_KEPT = 4096  # questions at most that wait to be sent
_SLOW = "if it is slow, or the link to it, raise machines.timeout_s"

Answer = tuple[Rows | Border, Mapping[str, Tensor]]


class TeacherAbsent(BadInput):
    """Nobody answers, as a teacher does, at the address of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a student waits: for an answer, and for a lost teacher to be there again."""

    answer_s: float = 90.0
    again_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Question:
    number: int
    data: bytes
    most_bytes: int  # of the answer's tensors


class TeacherLink:
    """The connection to the teacher at `host`:`port`. `ask` never waits, `take` waits for one answer.

    `whose`: what is there, a teacher or one of its stages; `key`: what names its address. The answers of a stage to the
    next one are of kind `Border`.
    Raises TeacherAbsent where nobody answers, BadInput for another secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        patience: Patience,
        whose: str = "the teacher",
        kind: type[Rows] | type[Border] = Rows,
        key: str = "train.loss",
    ) -> None:
        self.where = f"{host}:{port}"
        self._whose, self._kind, self._key = whose, kind, key
        self._address, self._token, self._patience = (host, port), token, patience
        self._changed = threading.Condition()
        self._waiting: deque[_Question] = deque()
        self._asked: deque[_Question] = deque()
        self._answers: dict[int, Answer] = {}
        self._now: set[int] = set()  # questions whose answer somebody waits for
        self._known: dict[int, int] = {}  # rows of the questions that wait, are asked, or have an answer
        self._failed = ""
        self._closed = False
        self._heard_s = time.monotonic()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._thread: threading.Thread | None = None
        self._terms: tuple[Terms, Mapping[str, Tensor]] | None = None
        self._ready: Ready | None = None
        self._socket: FrameSocket | None = None
        try:
            self._socket, self.facts = self._greeted()
        except (OSError, WireMismatch) as error:
            self.close()
            raise TeacherAbsent(self._absent(error), key=key) from None
        except (BadInput, RunFailed):
            self.close()
            raise

    def agree(self, terms: Terms, example: Mapping[str, Tensor]) -> tuple[Ready, Mapping[str, Tensor]]:
        """Say what is wanted, with a first batch; return the teacher's consent, with its head where that was asked for.

        From now on questions are sent. Raises BadInput.
        """
        assert self._socket is not None
        try:
            found = self._agreed(self._socket, terms, example)
        except TimeoutError as error:
            raise self._lost_with(f"{error}; {_SLOW}") from None
        except (OSError, RunFailed) as error:
            raise self._lost_with(str(error)) from None
        self._terms, self._ready = (terms.model_copy(update={"wants_head": False}), dict(example)), found[0]
        self._thread = threading.Thread(target=self._run, name="gossamer-teacher", daemon=True)
        self._thread.start()
        return found

    def ask(self, number: int, data: bytes, *, rows: int, most_bytes: int) -> None:
        """Send a packed question when it is its turn. `rows`: of its batch; `most_bytes`: of its answer's tensors."""
        with self._changed:
            self._known[number] = rows
            self._waiting.append(_Question(number, data, most_bytes))
            while len(self._waiting) > _KEPT:
                self._known.pop(self._waiting.popleft().number, None)
        self._wake()

    def has(self, number: int, rows: int) -> bool:
        """Return whether an answer to this question, of so many rows, is to be expected."""
        return self._known.get(number) == rows

    def take(self, number: int) -> Answer:
        """Wait for an answer and return it; older questions, which nobody waits for any more, are forgotten.

        Raises BadInput, TeacherLost.
        """
        began_s = time.monotonic()
        with self._changed:
            self._forget(number)
            self._now.add(number)
            self._wake()
            while number not in self._answers:
                if self._failed:
                    raise TeacherLost(self._failed)
                if time.monotonic() - max(began_s, self._heard_s) > self._patience.answer_s:
                    self._fail(f"it gave no answer within {self._patience.answer_s:g} s; {_SLOW}")
                    continue
                self._changed.wait(_TURN_S)
            self._now.discard(number)
            self._known.pop(number, None)
            found = self._answers.pop(number)
        self._wake()
        return found

    def give_up(self, why: str) -> None:
        """Let whoever waits for an answer, in another thread, know that there will be none."""
        with self._changed:
            self._fail(why)
        if self._socket is not None:
            self._socket.shut()

    def close(self) -> None:
        """End the thread and the connection."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._wake()
        if self._socket is not None:
            self._socket.shut()  # the thread may wait for a teacher that says nothing
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _forget(self, number: int) -> None:
        """Forget questions that were asked ahead, before the one of that number."""
        if number < 0:
            return
        for question in [one for one in self._waiting if 0 <= one.number < number]:
            self._waiting.remove(question)
            self._known.pop(question.number, None)
        for old in [one for one in self._answers if 0 <= one < number]:
            del self._answers[old]
            self._known.pop(old, None)
        for question in self._asked:
            if 0 <= question.number < number:
                self._known.pop(question.number, None)

    def _wake(self) -> None:
        with suppress(OSError):  # full: it wakes up anyway; closed: nobody is there
            os.write(self._wake_out, b"!")

    def _greeted(self) -> tuple[FrameSocket, Facts]:
        link = FrameSocket(socket.create_connection(self._address, timeout=_CONNECT_S), key=self._key)
        self._socket = link
        try:
            if self._closed:
                raise ConnectionError("the student ends")
            challenge, _ = link.receive(Challenge, within_s=_SAY_S)
            if challenge.protocol != PROTOCOL:
                raise WireMismatch(
                    f"wanted protocol {PROTOCOL}, got {challenge.protocol}: install one version on both hosts"
                )
            nonce = secrets.token_hex(32)
            proof = signed(self._token, "student", challenge.nonce, nonce)
            link.send(packed(Hello(nonce=nonce, proof=proof)), within_s=_SAY_S)
            welcome, _ = link.receive(Welcome, within_s=_SAY_S)
            if not hmac.compare_digest(welcome.proof, signed(self._token, "teacher", challenge.nonce, nonce)):
                raise bad_input(
                    wanted=f"a teacher at {self.where} that knows the secret of GOSSAMER_TEACHER_TOKEN",
                    got="one that does not",
                    do="see which program listens there: it was sent no data",
                    key=self._key,
                )
            facts, _ = link.receive(Facts, within_s=_SAY_S)
        except BaseException:
            link.close()
            raise
        return link, facts

    def _agreed(
        self, link: FrameSocket, terms: Terms, example: Mapping[str, Tensor]
    ) -> tuple[Ready, Mapping[str, Tensor]]:
        limit = _HEAD_BYTES if terms.wants_head else 0
        link.send(packed(terms, example), within_s=self._patience.answer_s)
        return link.receive(Ready, within_s=self._patience.answer_s, limit_bytes=limit)

    def _run(self) -> None:
        while True:
            try:
                self._exchange()
                return
            except (BadInput, RunFailed) as error:
                with self._changed:
                    self._fail(str(error))
                return
            except OSError as error:
                if not self._again(error):
                    return
            except Exception as error:  # whoever waits must not wait for a thread that is gone
                with self._changed:
                    self._fail(f"what it said could not be read ({type(error).__name__}: {error})")
                return

    def _exchange(self) -> None:
        """Send questions and receive answers until the link is closed."""
        assert self._socket is not None
        connection, reader, out = self._socket.socket, FrameReader(), memoryview(b"")
        connection.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not (self._closed or self._failed):
                out = out or self._next()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0)
                selector.modify(connection, events)
                ready = {key.fd: event for key, event in selector.select(_TURN_S)}
                if self._wake_in in ready:
                    os.read(self._wake_in, 4096)
                event = ready.get(connection.fileno(), 0)
                with suppress(BlockingIOError):  # what a selector says may be over when it is asked for
                    if event & selectors.EVENT_WRITE:
                        out = out[connection.send(out) :]
                    if event & selectors.EVENT_READ:
                        self._received(connection.recv(_PIECE), reader)

    def _next(self) -> memoryview:
        """Return the question that is to be sent now, nothing for none."""
        with self._changed:
            chosen = next((one for one in self._waiting if one.number in self._now), None)
            if chosen is None:
                if not self._waiting or len(self._asked) + len(self._answers) >= AHEAD:
                    return memoryview(b"")
                chosen = self._waiting[0]
            self._waiting.remove(chosen)
            self._asked.append(chosen)
            return memoryview(chosen.data)

    def _received(self, data: bytes, reader: FrameReader) -> None:
        if not data:
            raise ConnectionError("the teacher closed the connection")
        with self._changed:
            self._heard_s = time.monotonic()
            reader.limit_bytes = max((one.most_bytes for one in self._asked), default=0)
            for frame in reader.feed(data):
                said: Rows | Border = expected(frame, self._kind, key=self._key)
                if not self._asked or said.number != self._asked[0].number:
                    raise WireMismatch(
                        f"wanted the answer to question {[one.number for one in self._asked]}, got {said.number}"
                    )
                self._asked.popleft()
                if said.number in self._known:
                    self._answers[said.number] = said, frame.tensors
            self._changed.notify_all()

    def _again(self, error: OSError) -> bool:
        """Connect again; return whether the exchange goes on."""
        if self._socket is not None:
            self._socket.close()
        until_s, why = time.monotonic() + self._patience.again_s, str(error)
        while not self._closed:
            try:
                link, facts = self._greeted()
                try:
                    if facts.digest != self.facts.digest:
                        raise WireMismatch(
                            f"another teacher answers there now ({facts.digest}, before {self.facts.digest})"
                        )
                    assert self._terms is not None
                    if (ready := self._agreed(link, *self._terms)[0]) != self._ready:
                        raise WireMismatch(f"the teacher answers otherwise now ({ready}, before {self._ready})")
                except BaseException:
                    link.close()
                    raise
            except (BadInput, RunFailed) as refusal:
                why, until_s = str(refusal), 0.0
            except OSError as again:
                why = str(again)
            else:
                with self._changed:
                    self._socket, self._heard_s = link, time.monotonic()
                    self._waiting.extendleft(reversed([one for one in self._asked if one.number in self._known]))
                    self._asked.clear()
                return True
            with self._changed:
                self._heard_s = time.monotonic()
                if time.monotonic() > until_s:
                    self._fail(f"{why} (tried to connect again for {self._patience.again_s:g} s)" if until_s else why)
                    return False
                self._changed.wait(_TURN_S)
        return False

    def _fail(self, why: str) -> None:
        """Let whoever waits know that there will be no answer."""
        self._failed = self._failed or str(self._lost_with(why))
        self._changed.notify_all()
        self._wake()

    def _absent(self, error: Exception) -> str:
        wanted = "a teacher" if self._kind is Rows else self._whose
        found = bad_input(
            wanted=f"{wanted} that answers at {self.where}",
            got=str(error),
            do=f"start `gossamer teach TEACHER --listen {self.where}` there, wait until it is loaded, and see that "
            "this host reaches it",
        )
        return found.message

    def _lost_with(self, why: str) -> TeacherLost:
        lost = f"{self._whose} at {self.where} was lost: {why}"
        if self._kind is Border:  # whoever asks this stage says what to do
            return TeacherLost(lost)
        return TeacherLost(
            f"{lost}. See what `gossamer teach` says there, start it again, and go on with: gossamer resume RUN_DIR"
        )
