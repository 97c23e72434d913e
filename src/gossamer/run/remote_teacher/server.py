"""The server of a teacher, or of one of its stages: one listening socket, and one thread that computes for all.

For each student one thread reads its questions, and passes them to the stage before where there is one; another one
answers them, in order. So each stage computes while the others compute other questions.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from gossamer.run.remote_teacher.frames import FrameSocket, packed
from gossamer.run.remote_teacher.messages import (
    MOST_ASKED_BYTES,
    PROTOCOL,
    Ask,
    Challenge,
    Hello,
    Refusal,
    Terms,
    Welcome,
    signed,
)
from gossamer.run.remote_teacher.served import ServedTeacher
from gossamer.run.remote_teacher.stage import NOTHING, Reading, Received, StageBefore, Wanted, check_asked, received_by
from gossamer.run.remote_teacher.states import VALID
from gossamer.spec.errors import BadInput, RunFailed, bad_input

_GREET_S, _SEND_S, _TURN_S = 10.0, 120.0, 0.25
_READ_AHEAD = 4  # questions of one student that are read and not answered
_KEY = "train.loss"
T = TypeVar("T")


@dataclass(slots=True)
class Served:
    """What a server has done."""

    students: int = 0
    questions: int = 0
    tokens: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Session:
    """One student: how its batches are read, and its connection to the stage before (None without one)."""

    reading: Reading
    before: StageBefore | None


@dataclass(frozen=True, slots=True)
class _Question:
    """A question. `asked`: the number of the one that was asked of the stage before, with what is to come."""

    number: int
    batch: Mapping[str, Tensor]
    asked: tuple[int, Wanted] | None = None


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
    _before: dict[FrameSocket, StageBefore] = field(default_factory=dict)
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
                links, befores = dict(self._links), list(self._before.values())
            for link in links:
                link.close()
            for before in befores:
                before.give_up()
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
        who, how = f"a student at {host}", "was refused"
        try:
            session = self._greeted(link)
            with self._lock:
                self.done.students += 1
                number = self.done.students
            terms = session.reading.terms
            kind = f"its {terms.top_k} most probable words" if terms.top_k else "rows of hidden states"
            who, how = f"student {number} at {host}", "was told"
            if terms.experts:
                kind = f"outputs of the experts of {len(terms.experts)} layers"
            if terms.blocks:
                kind += f", and the states of {', '.join(terms.blocks)}"
            if terms.part is not None:
                who, kind = f"stage {terms.part.stage} at {host}, for student {number},", "what it receives"
            self.tell(f"{who} asks for {kind}")
            try:
                self._answer_all(link, session)
            finally:
                self.tell(f"{who} left")
        except (BadInput, RunFailed) as error:
            self._refuse(link, error)
            self.tell(f"{who} {how}: {_plain(error)}")
        except OSError:  # it left, or the server ends
            pass
        finally:
            link.close()
            with self._lock:
                before = self._before.pop(link, None)
            if before is not None:
                before.close()

    def _refuse(self, link: FrameSocket, error: BadInput | RunFailed) -> None:
        said = Refusal(message=_plain(error)[:4000], is_input=isinstance(error, BadInput))
        with suppress(OSError):
            link.send(packed(said), within_s=_TURN_S)

    def _greeted(self, link: FrameSocket) -> _Session:
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
        terms, example = link.receive(Terms, within_s=None, limit_bytes=MOST_ASKED_BYTES)
        check_asked(self.teacher.facts.part, terms)
        reading = self.teacher.reading(terms, example)
        session = _Session(reading, self._joined(link, terms, example))
        first = self._received(session, self._asked(session, 0, example))
        ready, head = self._compute(lambda: self.teacher.ready(reading, example, first))
        link.send(packed(ready, head), within_s=_SEND_S)
        return session

    def _joined(self, link: FrameSocket, terms: Terms, example: Mapping[str, Tensor]) -> StageBefore | None:
        """Return a connection to the stage before that is this student's alone, where there is such a stage."""
        stage = self.teacher.stage
        if stage is None or stage.before is None:
            return None
        before = StageBefore(stage.before, stage.part)
        with self._lock:
            self._before[link] = before
        if self._stopping.is_set():
            raise ConnectionError("the server ends")
        before.agree(terms, example)
        return before

    def _answer_all(self, link: FrameSocket, session: _Session) -> None:
        questions: queue.Queue[_Question | Exception] = queue.Queue(_READ_AHEAD)
        reader = threading.Thread(
            target=self._read_all, args=(link, session, questions), name="gossamer-questions", daemon=True
        )
        reader.start()
        try:
            while not self._stopping.is_set():
                found = questions.get()
                if isinstance(found, Exception):
                    raise found
                self._answered(link, session, found)
        except (BadInput, RunFailed) as error:
            self._refuse(link, error)  # before the reader's end is one of the connection
            raise
        finally:
            while reader.is_alive():  # it may wait for a place in the queue, or for a student
                link.shut()
                with suppress(queue.Empty):
                    questions.get(timeout=_TURN_S)

    def _read_all(self, link: FrameSocket, session: _Session, questions: queue.Queue[_Question | Exception]) -> None:
        try:
            while True:
                asked, batch = link.receive(Ask, within_s=None, limit_bytes=MOST_ASKED_BYTES)
                questions.put(self._asked(session, asked.number, batch))
        except Exception as error:  # whoever answers says it, after what was asked before
            questions.put(error)

    def _asked(self, session: _Session, number: int, batch: Mapping[str, Tensor]) -> _Question:
        """Return a question, which the stage before has been asked, if there is one."""
        stage, before = self.teacher.stage, session.before
        if stage is None or before is None:
            return _Question(number, batch)
        given = self.teacher.asked(session.reading, batch)
        way = stage.known(session.reading, given) or self._compute(lambda: stage.way(session.reading, given))
        wanted = received_by(way, session.reading.terms, batch)
        passed = {name: batch[name] for name in (*session.reading.beside, VALID) if name in batch}
        return _Question(number, batch, (before.ask({**given, **passed}, wanted), wanted))

    def _received(self, session: _Session, question: _Question) -> Received:
        if session.before is None or question.asked is None:
            return NOTHING
        return session.before.take(*question.asked)

    def _answered(self, link: FrameSocket, session: _Session, question: _Question) -> None:
        received = self._received(session, question)
        said, tensors = self._compute(
            lambda: self.teacher.answer(session.reading, question.number, question.batch, received)
        )
        data = packed(said, tensors)
        link.send(data, within_s=_SEND_S)
        with self._lock:
            self.done.questions += 1
            self.done.tokens += len(next(iter(tensors.values()), ())) if self.teacher.is_last else 0
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


def _plain(error: BadInput | RunFailed) -> str:
    return str(error).removeprefix(f"{_KEY}: ")
