"""A teacher on another host: the losses of one beside the student, over a server's loss, and what is refused."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.job.found_teacher import FoundTeacher, find_teacher
from gossamer.job.served_teacher import serve_teacher
from gossamer.job.teacher_facts import digest_of, facts_of
from gossamer.launch.environment import TEACHER_TOKEN
from gossamer.launch.port import listen
from gossamer.loss.kl import Kl
from gossamer.model.forward_adapter import caller_of
from gossamer.model.precision import precision_of
from gossamer.model.python_state.random_generators import generator_states
from gossamer.run.batches import Batches
from gossamer.run.remote_teacher.frames import FrameReader, FrameSocket, packed
from gossamer.run.remote_teacher.link import Patience, TeacherLink
from gossamer.run.remote_teacher.messages import Ask, Challenge, Facts, Hello, Ready, Rows, Terms, Welcome, signed
from gossamer.run.remote_teacher.served import ServedTeacher
from gossamer.run.remote_teacher.server import TeacherServer
from gossamer.run.remote_teacher.teacher import TICKET, RemoteTeacher, RemoteTeacherBatches
from gossamer.run.teacher import KnownWords, Teacher, watched
from gossamer.spec.errors import BadInput, RunFailed, TeacherLost, WireMismatch
from pool import Pool
from ports import free_port
from run.test_distillation import course, losses, records, saved, sections, taid, train

CPU = torch.device("cpu")
SOON = Patience(answer_s=60.0, again_s=5.0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("teacher"), 16)


@contextmanager
def serving(teacher: str | nn.Module, *, port: int = 0, token: str = "", **more: Any) -> Iterator[TeacherServer]:
    """Serve a teacher in a thread of this process."""
    module = find_teacher(teacher).module if isinstance(teacher, str) else teacher
    facts = facts_of(FoundTeacher(module=module, tokenizer=None, positions=None), digest_of(module))
    server = TeacherServer(
        teacher=ServedTeacher(module, facts, CPU), listener=listen("127.0.0.1", port), token=token, **more
    )
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def place(server: TeacherServer) -> tuple[str, int]:
    host, port = server.listener.getsockname()
    return host, port


def named(server: TeacherServer) -> str:
    return "tcp://{}:{}".format(*place(server))


@pytest.fixture
def server(teacher: str) -> Iterator[TeacherServer]:
    with serving(teacher) as found:
        yield found


def test_hidden_rows_give_the_losses_of_a_teacher_beside_the_student(
    pool: Pool, teacher: str, server: TeacherServer, tmp_path: Path
) -> None:
    """On replicas with unequal labels, micro-batches and an adaptive t: rows and head are the same, bit for bit."""
    for name, of in (("here", teacher), ("there", named(server))):
        train(pool, 2, tmp_path / name, sections(taid(of), accumulate=2))
    assert losses(tmp_path / "there") == losses(tmp_path / "here")
    assert course(tmp_path / "there") == course(tmp_path / "here")
    said = [one["message"] for one in records(tmp_path / "there", "event")]
    assert any("rows of hidden states, and its head once: 64 bytes a token" in one for one in said)
    assert not any("held whole" in one for one in said)


def test_words_give_the_losses_of_kept_ones(pool: Pool, teacher: str, server: TeacherServer, tmp_path: Path) -> None:
    """The teacher is run on micro-batches instead of 32 sequences at a time, so rounding may differ."""
    for name, of in (("kept", teacher), ("there", named(server))):
        train(pool, 2, tmp_path / name, sections({"kl": {"teacher": of, "top_k": 4, "temperature": 2.0}}))
    assert losses(tmp_path / "there") == pytest.approx(losses(tmp_path / "kept"), rel=1e-6)
    assert not list((tmp_path / "there" / "run").glob("teacher-*"))


@pytest.mark.nightly
def test_stages_ask_from_the_last_one(pool: Pool, teacher: str, server: TeacherServer, tmp_path: Path) -> None:
    plan = {"mesh": {"pipe": 2}, "cuts": ["embed", "layers.1"]}
    before = server.done.students
    train(pool, 1, tmp_path / "one", sections(taid(teacher), accumulate=2))
    train(pool, 2, tmp_path / "two", sections(taid(named(server)), plan, accumulate=2), values=False)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert server.done.students == before + 1


@pytest.mark.nightly
def test_a_resume_goes_on_with_the_course(pool: Pool, teacher: str, server: TeacherServer, tmp_path: Path) -> None:
    for name, of in (("here", teacher), ("there", named(server))):
        train(pool, 2, tmp_path / name, sections(taid(of)), until=3)
        train(pool, 2, tmp_path / name, sections(taid(of)), resume=True)
    assert losses(tmp_path / "there") == losses(tmp_path / "here")


def test_what_is_asked_ahead_is_asked_once(pool: Pool, teacher: str, tmp_path: Path) -> None:
    """Six steps of two micro-batches: with the first look, and the batch after the last step, 14 questions."""
    with serving(teacher) as found:
        train(pool, 1, tmp_path, sections({"kl": {"teacher": named(found)}}, accumulate=2))
        assert found.done.questions <= 14 + 2  # what the run itself looks at before step 1


IDS = torch.arange(18).view(2, 9) % 16
BATCH = {"input_ids": IDS, "labels": IDS}


def terms(**more: Any) -> Terms:
    usual = {"top_k": 0, "temperature": 1.0, "words": None, "tile_tokens": 5, "precision": "fp32", "dims": 3}
    return Terms.model_validate({**usual, "isolates": False, "wants_head": not more.get("top_k"), **more})


def valid() -> Tensor:
    counts = torch.ones(2, 9, dtype=torch.bool)
    counts[:, -1] = False
    return counts.flatten().nonzero().squeeze(1)


@contextmanager
def joined(found: TeacherServer, token: str = "", patience: Patience = SOON, **more: Any) -> Iterator[RemoteTeacher]:
    with ExitStack() as stack:
        link = TeacherLink(*place(found), token=token, patience=patience)
        stack.callback(link.close)
        yield RemoteTeacher.of(link, terms(**more), BATCH, CPU)


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(input_ids=IDS).logits
        return found.flatten(0, 1)


def test_rows_of_a_batch_are_asked_for_when_no_question_fits(teacher: str, server: TeacherServer) -> None:
    """A second time, in another order, or a part of them: the rows of the tokens, not those of the ticket."""
    wanted = logits(find_teacher(teacher).module)
    with joined(server) as remote:
        batch = remote.ask(BATCH)
        for _ in range(2):
            found = remote.answer(batch, valid())
            assert not isinstance(found, KnownWords) and torch.equal(found.logits(), wanted[valid()])
        turned = {name: one.flip(0) for name, one in remote.ask(BATCH).items()}
        found = remote.answer(turned, valid())
        assert not isinstance(found, KnownWords)
        torch.testing.assert_close(found.logits(), wanted.view(2, 9, -1).flip(0)[:, :-1].flatten(0, 1))
        part = {name: one[1:] for name, one in remote.ask(BATCH).items()}
        assert TICKET in part
        found = remote.answer(part, torch.arange(8))
        assert not isinstance(found, KnownWords)
        torch.testing.assert_close(found.logits(), wanted[9:17])


def test_abandoned_questions_do_not_stand_in_the_way(server: TeacherServer) -> None:
    with joined(server, top_k=3) as remote:
        for _ in range(10):
            remote.ask(BATCH)
        first, last = remote.ask(BATCH), remote.ask(BATCH)
        found = [remote.answer(one, valid()) for one in (last, first)]  # the first is forgotten, and asked again
        assert all(isinstance(one, KnownWords) and one.words.shape == (16, 3) for one in found)


def test_a_server_that_comes_back_is_asked_again(teacher: str) -> None:
    with serving(teacher, port=free_port()) as found:
        port = place(found)[1]
        stack = ExitStack()
        remote = stack.enter_context(joined(found))
        remote.answer(remote.ask(BATCH), valid())
    with stack, serving(teacher, port=port) as again:
        assert remote.answer(remote.ask(BATCH), valid()).logits().shape == (16, 16)  # type: ignore[union-attr]
        assert again.done.students == 1


def test_a_server_that_stays_away_is_lost(teacher: str) -> None:
    with serving(teacher) as found, ExitStack() as stack:
        remote = stack.enter_context(joined(found, patience=Patience(answer_s=60.0, again_s=0.1)))
        where = "{}:{}".format(*place(found))
        remote.answer(remote.ask(BATCH), valid())
        found.stop()
        with pytest.raises(TeacherLost, match=rf"the teacher at {where} was lost: .*tried to connect again for 0.1 s"):
            for _ in range(50):
                remote.answer(remote.ask(BATCH), valid())


def test_another_teacher_at_the_same_place_is_refused(teacher: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(teacher)
    other.lm_head.weight.data.add_(1)
    with serving(teacher, port=free_port()) as found:
        port, stack = place(found)[1], ExitStack()
        remote = stack.enter_context(joined(found))
    with stack, serving(other, port=port), pytest.raises(TeacherLost, match="another teacher answers there now"):
        remote.answer(remote.ask(BATCH), valid())


def test_a_run_without_its_teacher_ends_with_its_address(pool: Pool, tmp_path: Path) -> None:
    port = free_port()
    said = rf"a teacher that answers at 127.0.0.1:{port}, got .*refused.*start `gossamer teach TEACHER"
    with pytest.raises(AssertionError, match=said):
        train(pool, 1, tmp_path, sections({"kl": {"teacher": f"tcp://127.0.0.1:{port}"}}))


def test_secrets_are_compared(teacher: str) -> None:
    with serving(teacher, token="right") as found:
        with joined(found, token="right") as remote:
            assert remote.ready.width == 16
        for wrong in ("", "wrong"):
            with pytest.raises(
                BadInput, match="the secret of this teacher, got another one: set GOSSAMER_TEACHER_TOKEN"
            ):
                TeacherLink(*place(found), token=wrong, patience=SOON)


def test_more_students_than_a_server_takes_are_refused(teacher: str) -> None:
    with serving(teacher, clients=1) as found, joined(found):
        with pytest.raises(BadInput, match="at most 1 students at a time"):
            TeacherLink(*place(found), token="", patience=SOON)


class Changing(nn.Module):
    """A model whose logits do not come from its head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(input_ids))
        found += 1
        return found


def test_a_teacher_without_a_head_sends_words_alone() -> None:
    with serving(Changing()) as found:
        with pytest.raises(BadInput, match=r"hidden states can be sent, got it changes its logits in place: set top_k"):
            with joined(found):
                pass
        with joined(found, top_k=15) as remote:
            assert isinstance(remote.answer(remote.ask(BATCH), valid()), KnownWords)
        with pytest.raises(BadInput, match="fewer than 16 words, got 16"), joined(found, top_k=16):
            pass
        with pytest.raises(BadInput, match=r"a forward of the teacher with a parameter position_ids"):
            with joined(found, isolates=True):
                pass


class Capped(nn.Module):
    """A model that scales and caps its logits, and reads positions and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows = self.embed(input_ids) * (1 + position_ids[..., None]) * attention_mask[..., None]
        return torch.tanh(self.head(rows) / 2) * 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_caps_positions_masks_and_precision_are_those_of_a_teacher_here(precision: str) -> None:
    torch.manual_seed(0)
    module, mask = Capped(), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    batch = {**BATCH, "position_ids": torch.arange(9).repeat(2, 1) % 4, "attention_mask": mask, "other": IDS}
    local = Teacher(module=module, caller=caller_of(module, batch), parameters=1)
    undo, _ = watched(module)
    with precision_of(precision).autocast(CPU):
        wanted = local.rows(batch, 3).chosen(valid()).logits()
    undo()
    with serving(module) as found, ExitStack() as stack:
        link = TeacherLink(*place(found), token="", patience=SOON)
        stack.callback(link.close)
        remote = RemoteTeacher.of(link, terms(precision=precision, isolates=True), batch, CPU)
        assert set(remote.ready.names) == {"input_ids", "position_ids", "attention_mask"}
        assert remote.bytes_per_token == 8 * (4 if precision == "fp32" else 2)
        answer = remote.answer(remote.ask(batch), valid())
        assert not isinstance(answer, KnownWords) and torch.equal(answer.logits(), wanted)


def test_a_teacher_that_does_not_answer_is_named() -> None:
    with pretending(READY, b"") as (host, port):
        link = TeacherLink(host, port, token="", patience=Patience(answer_s=0.3, again_s=0.1))
        try:
            remote = RemoteTeacher.of(link, terms(), BATCH, CPU)
            with pytest.raises(
                TeacherLost, match=f"the teacher at {host}:{port} was lost: it gave no answer within 0.3 s"
            ):
                remote.answer(remote.ask(BATCH), valid())
        finally:
            link.close()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (IDS + 1, "wanted tokens from 0 to 15, got 1 to 16"),
        (IDS - 1, "wanted tokens from 0 to 15, got -1 to 14"),
        (IDS.float(), "wanted input_ids of integers, got torch.float32"),
        (IDS[None], r"cannot compute this batch \(RuntimeError"),
    ],
)
def test_a_batch_that_a_teacher_cannot_compute_is_told(server: TeacherServer, ids: Tensor, said: str) -> None:
    with joined(server) as remote, pytest.raises(TeacherLost, match=said):
        remote.answer(remote.ask({"input_ids": ids, "labels": IDS}), valid())


def test_who_says_nothing_is_waited_for_by_nobody(server: TeacherServer) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(place(server), timeout=5))
        remote = stack.enter_context(joined(server))
        assert remote.answer(remote.ask(BATCH), valid()).logits().shape == (16, 16)  # type: ignore[union-attr]


def test_digests_tell_tensors_apart() -> None:
    """By name and shape too; they do not depend on the order."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    one = digest_of(nn.ModuleDict({"a": first, "b": second}))
    assert one == digest_of(nn.ModuleDict({"b": second, "a": first}))
    assert one != digest_of(nn.ModuleDict({"a": second, "b": first}))
    flat = nn.ParameterList([first.weight.flatten()])
    assert digest_of(flat) != digest_of(nn.ParameterList([first.weight]))


def test_garbage_ends_a_connection_and_nothing_else(server: TeacherServer) -> None:
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        packed(terms(), BATCH),
        packed(Hello(nonce="1" * 64, proof="0" * 64), {"x": IDS}),
    ):
        with socket.create_connection(place(server), timeout=5) as link:
            link.sendall(garbage)
            while link.recv(1 << 16):
                pass
    with joined(server) as remote:
        assert remote.ready.width == 16


WHOLE = Facts(parameters=1)


@contextmanager
def pretending(*answers: bytes, token: str = "", facts: Facts = WHOLE) -> Iterator[tuple[str, int]]:
    """Serve one student with frames that were made before, after those of a greeting: one after each that it sends."""
    with listen("127.0.0.1", 0) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(packed(Challenge(nonce=NONCE)))
                (hello,) = FrameReader().feed(connection.recv(1 << 20))
                assert isinstance(hello.said, Hello)
                proof = signed(token, "teacher", NONCE, hello.said.nonce)
                connection.sendall(packed(Welcome(proof=proof)) + packed(facts))
                connection.recv(1 << 20)
                for answer in answers:
                    connection.sendall(answer)
                    connection.recv(1 << 20)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join(10)


NONCE = "0" * 64
HEAD = {"weight": torch.ones(16, 8)}
READY = packed(Ready(width=16, hidden=8, compute="", names=("input_ids",)), HEAD)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (packed(Rows(number=0), {"hidden": torch.zeros(16, 9)}), "tensors of at most 512, got"),
        (packed(Rows(number=0), {"hidden": torch.zeros(8, 16)}), "other tensors than those of 16 tokens"),
        (packed(Rows(number=7), {"hidden": torch.zeros(16, 8)}), r"the answer to question \[0\], got 7"),
        (packed(Ask(number=0)), "a message of kind rows, got 'ask'"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a frame of Gossamer's teachers, got b'HTTP"),
    ],
)
def test_garbage_of_a_teacher_ends_the_student(answer: bytes, said: str) -> None:
    with pretending(READY, answer) as (host, port):
        link = TeacherLink(host, port, token="", patience=SOON)
        try:
            remote = RemoteTeacher.of(link, terms(), BATCH, CPU)
            with pytest.raises(RunFailed, match=said):
                remote.answer(remote.ask(BATCH), valid())
        finally:
            link.close()


@pytest.mark.parametrize("head", [{}, {"weight": torch.ones(16, 7)}, {**HEAD, "bias": torch.ones(3)}])
def test_a_head_of_another_shape_is_refused(head: dict[str, Tensor]) -> None:
    ready = packed(Ready(width=16, hidden=8, compute="", names=("input_ids",)), head)
    with pretending(ready) as (host, port):
        link = TeacherLink(host, port, token="", patience=SOON)
        try:
            with pytest.raises(WireMismatch, match="head"):
                RemoteTeacher.of(link, terms(), BATCH, CPU)
        finally:
            link.close()


def test_frames_are_what_was_packed() -> None:
    tensors = {
        "ids": IDS,
        "far": torch.tensor([1 << 40]),
        "half": torch.randn(3, 2).bfloat16(),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(True),
    }
    data, reader = packed(Ask(number=-3), tensors), FrameReader(limit_bytes=1 << 10)
    assert reader.feed(data[:30]) == []
    (frame,) = reader.feed(data[30:])
    assert frame.said == Ask(number=-3) and frame.tensors.keys() == tensors.keys()
    for name, one in tensors.items():
        assert torch.equal(frame.tensors[name], one) and frame.tensors[name].dtype is one.dtype
    assert len(packed(Ask(number=0), {"ids": IDS})) < len(packed(Ask(number=0), {"ids": IDS + (1 << 40)}))


def _frame(said: bytes) -> bytes:
    return struct.pack("!4sBIQ", b"GSTR", 1, len(said), 0) + said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"\x80" + data[1:], "a frame of Gossamer's teachers"),
        (lambda data: data[:4] + b"\x02" + data[5:], "version 1, got 2"),
        (lambda data: data.replace(b'"shape":[2,9]', b'"shape":[2,8]'), "got shapes of another size"),
        (lambda data: data.replace(b'"shape":[2,9]', b'"shape":[2,x]'), "a message of this version"),
        (
            lambda _: packed(Ask(number=0), {"no": torch.zeros(10**9, 0, 10**9, 10**9)}).replace(
                b"1000000000", b"9" * 10
            ),
            "a shape that",
        ),
        (lambda data: data.replace(b'"int32"', b'"int33"'), "a message of this version"),
        (lambda data: data.replace(b'"int64"', b'"uint8"'), "uint8 does not travel as int32"),
        (lambda data: _frame(b"[" * 100_000), "a message of this version"),
        (lambda _: _frame(packed(terms())[17:].replace(b'"temperature":1.0', b'"temperature":1e999')), "finite number"),
        (lambda data: _frame(data[17:60]), "a message of this version"),
        (lambda data: b"GSTR\x01" + b"\xff" * 12, "got 4294967295 and 18446744073709551615"),
    ],
)
def test_what_is_no_frame_is_refused(change: Any, said: str) -> None:
    with pytest.raises(WireMismatch, match=said):
        FrameReader(limit_bytes=1 << 10).feed(change(packed(Ask(number=0), {"ids": IDS})))
    with pytest.raises(WireMismatch, match="tensors of at most 10"):
        FrameReader(limit_bytes=10).feed(packed(Ask(number=0), {"ids": IDS}))


def test_what_a_teacher_elsewhere_cannot_do_is_refused() -> None:
    with pytest.raises(BadInput, match="no teacher_ranks with a teacher on another host"):
        Kl(teacher="tcp://10.0.0.1:29600", top_k=3, teacher_ranks=(0,))
    for wrong in ("tcp://10.0.0.1", "tcp://:1", "tcp://x:70000", "tcp://secret@x:1"):
        with pytest.raises(BadInput, match="tcp://HOST:PORT such as"):
            Kl(teacher=wrong)
    with pytest.raises(BadInput, match="as the model itself is needed here"):
        find_teacher("tcp://10.0.0.1:29600")


def test_a_server_that_others_reach_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEACHER_TOKEN, raising=False)
    with pytest.raises(BadInput, match=r"a secret, as 0.0.0.0 can be reached.*set GOSSAMER_TEACHER_TOKEN"):
        serve_teacher("nowhere", "0.0.0.0:29600")
    with pytest.raises(BadInput, match="1 or more students"):
        serve_teacher("nowhere", "127.0.0.1:29600", clients=0)


def test_signatures_depend_on_secret_side_and_numbers() -> None:
    ones = ("0" * 64, "1" * 64)
    sides: tuple[Literal["student", "teacher"], ...] = ("student", "teacher")
    assert len({signed(token, who, a, b) for token in ("", "a") for who in sides for a in ones for b in ones}) == 16


def test_a_teacher_that_does_not_know_the_secret_gets_no_tokens() -> None:
    with (
        pretending(token="wrong") as place,
        pytest.raises(BadInput, match=r"knows the secret .* got one that does not"),
    ):
        TeacherLink(*place, token="right", patience=SOON)


class SlowSocket:
    """A socket that takes or gives 1,000 bytes in 8 s of a clock of its own."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.sent, self.now_s = data, b"", 0.0

    def setsockopt(self, *_: object) -> None:
        """Do nothing."""

    def settimeout(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def send(self, data: memoryview) -> int:
        self.sent += data[:1000]
        return len(data[:1000])

    def recv(self, _: int) -> bytes:
        if self.limit_s < 8.0:
            raise TimeoutError
        self.now_s += 8.0
        found, self.data = self.data[:1000], self.data[1000:]
        return found


def test_a_frame_may_take_longer_than_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(Rows(number=0), {"hidden": torch.zeros(1000)})
    slow = SlowSocket(data)
    monkeypatch.setattr("gossamer.run.remote_teacher.frames.time.monotonic", lambda: slow.now_s)
    link = FrameSocket(slow)  # type: ignore[arg-type]
    link.send(data, within_s=10.0)
    assert slow.sent == data
    assert link.receive(Rows, within_s=10.0, limit_bytes=4000)[1]["hidden"].shape == (1000,)
    slow.data = data
    with pytest.raises(TimeoutError):
        link.receive(Rows, within_s=6.0, limit_bytes=4000)


def test_a_link_ends_while_it_waits_for_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher leaves after its consent; a second connection is taken by nobody, and says nothing."""
    monkeypatch.setattr("gossamer.run.remote_teacher.link._SAY_S", 60.0)
    with pretending(READY) as (host, port):
        link = TeacherLink(host, port, token="", patience=SOON)
        remote = RemoteTeacher.of(link, terms(), BATCH, CPU)
        first = link._socket
        remote.ask(BATCH)
        until_s = time.monotonic() + 20
        while link._socket is first and time.monotonic() < until_s:
            time.sleep(0.01)
        ending = threading.Thread(target=link.close, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()


class Drawn(Batches):
    """Batches of numbers from a default generator."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 8

    def text_bytes(self, indices: Any) -> int | None:
        return None

    def batch(self, indices: Any) -> dict[str, Tensor]:
        return {"x": torch.tensor([self.draw() for _ in indices])}


class Asked:
    """What takes the place of a teacher, and says what it was asked."""

    def __init__(self) -> None:
        self.batches = list[Mapping[str, Tensor]]()

    def ask(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.batches.append(batch)
        return batch


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, np.random.rand])
def test_items_that_draw_are_not_read_ahead(draw: Callable[[], float]) -> None:
    """A checkpoint between reading and use would have the generators after it, and a resumed run draw others."""
    asked, before = Asked(), generator_states()
    batches = RemoteTeacherBatches(Drawn(draw), asked)  # type: ignore[arg-type]
    batches.announce(np.arange(2))
    assert generator_states() == before and not asked.batches and not batches.is_announced
    batches.batch(np.arange(2))
    assert len(asked.batches) == 1
