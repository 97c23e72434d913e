"""A teacher in stages: each process has its part alone, and the answers are those of the whole teacher, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from gossamer.job.divided_teacher import AskedStage, DividedTeacher, find_stage
from gossamer.job.found_teacher import find_teacher
from gossamer.job.served_teacher import _place_before, serve_teacher
from gossamer.job.teacher_facts import digest_of
from gossamer.launch.port import listen
from gossamer.run.remote_teacher import stage as remote_stage
from gossamer.run.remote_teacher.frames import packed
from gossamer.run.remote_teacher.link import Patience
from gossamer.run.remote_teacher.messages import Border, Facts, Ready
from gossamer.run.remote_teacher.server import TeacherServer
from gossamer.run.remote_teacher.stage import PlaceBefore
from gossamer.run.teacher import KnownWords
from gossamer.spec.errors import BadInput, TeacherLost
from pool import Pool
from run.test_distillation import losses, saved, sections, train
from run.test_remote_teacher import BATCH, CPU, IDS, SOON, joined, named, place, pretending, terms, valid


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("llama"), 16)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, bos_token_id=0, eos_token_id=0, **sizes))
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return str(folder)


@cache
def stage_of(teacher: str, stage: int, stages: int, cuts: tuple[int | str, ...] = ()) -> DividedTeacher:
    return find_stage(teacher, AskedStage(stage, stages, cuts), CPU)


@contextmanager
def serving(
    stage: DividedTeacher, before: TeacherServer | None = None, *, port: int = 0, token: str = ""
) -> Iterator[TeacherServer]:
    """Serve a stage in a thread of this process."""
    at = None
    if before is not None:
        at = _place_before(place(before), stage, token, 0.0, lambda said: None)
        at = replace(at, patience=SOON)
    with running(stage, at, port=port, token=token) as server:
        yield server


@contextmanager
def running(
    stage: DividedTeacher, at: PlaceBefore | None, *, port: int = 0, token: str = ""
) -> Iterator[TeacherServer]:
    server = TeacherServer(teacher=stage.served(CPU, at), listener=listen("127.0.0.1", port), token=token)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def chain(teacher: str, stages: int, cuts: tuple[int | str, ...] = ()) -> Iterator[list[TeacherServer]]:
    """Serve all stages of a teacher; yield their servers, in order."""
    with ExitStack() as stack:
        found = list[TeacherServer]()
        for number in range(1, stages + 1):
            stage = stage_of(teacher, number, stages, cuts)
            found.append(stack.enter_context(serving(stage, found[-1] if found else None)))
        yield found


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module.eval()(input_ids=IDS).logits
        return found.flatten(0, 1)[valid()]


def parameter_bytes(module: nn.Module, names: frozenset[str] | None = None) -> int:
    return sum(one.nbytes for name, one in module.named_parameters() if names is None or name in names)


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("tied", 3),
        ("untied", 2),
        pytest.param("tied", 2, marks=pytest.mark.nightly),
        pytest.param("untied", 3, marks=pytest.mark.nightly),
    ],
)
def test_the_logits_are_those_of_the_whole_teacher(kind: str, stages: int, request: pytest.FixtureRequest) -> None:
    """Hidden rows and words, bit for bit; the digest too. Each stage has memory for its own parameters alone."""
    teacher = request.getfixturevalue(kind)
    whole = find_teacher(teacher).module
    wanted = logits(whole)
    with chain(teacher, stages) as servers, joined(servers[-1]) as remote:
        for _ in range(2):
            found = remote.answer(remote.ask(BATCH), valid())
            assert not isinstance(found, KnownWords) and torch.equal(found.logits(), wanted)
        assert remote.link.facts.digest == f"{int(digest_of(whole)):012x}"
        with joined(servers[-1], top_k=3) as other:
            words = other.answer(other.ask(BATCH), valid())
            assert isinstance(words, KnownWords) and torch.equal(words.words, wanted.topk(3, dim=1).indices)
    assert [one.done.tokens for one in servers] == [*[0] * (stages - 1), 48]
    parts = [stage_of(teacher, number, stages) for number in range(1, stages + 1)]
    for one in parts:
        assert one.held_bytes == parameter_bytes(whole, one.stage.part.holds) < one.whole_bytes
    twice = whole.get_input_embeddings().weight.nbytes if kind == "tied" else 0
    assert sum(one.held_bytes for one in parts) == parameter_bytes(whole) + twice


def test_cuts_are_where_they_are_asked_for(tied: str) -> None:
    equal, given = stage_of(tied, 1, 2), stage_of(tied, 1, 2, (0, 0))
    assert equal.cuts.first == ("transformer.wte", "transformer.h.1")  # wte is held by the last stage too
    assert given.cuts.first == ("transformer.wte", "transformer.h.0")


def test_what_cannot_be_divided_so_is_named(tied: str, untied: str) -> None:
    for teacher, asked, said in (
        (untied, AskedStage(1, 9), "at least 9 units for 9 stages, got 5: model.embed_tokens, .* use 5 stages at most"),
        (untied, AskedStage(1, 2, (0,)), "the first unit of each of 2 stages, got 1"),
        (untied, AskedStage(1, 2, (0, 7)), "--cuts: wanted the number of a block, 0 to 1, got 7"),
        (untied, AskedStage(1, 2, (0, "model.layers.7")), "no unit 'model.layers.7': did you mean"),
        ("tcp://10.0.0.1:1", AskedStage(1, 2), "as the model itself is needed here"),
        ("nowhere", AskedStage(1, 2), "'nowhere', which does not exist"),
    ):
        with pytest.raises(BadInput, match=said):
            find_stage(teacher, asked, CPU)


def test_stages_of_different_teachers_are_named(tied: str, untied: str, tmp_path: Path) -> None:
    other = saved(tmp_path, 17)
    with serving(stage_of(untied, 1, 2)) as first:
        for stage, said in (
            (stage_of(other, 2, 2), "the same teacher in all stages, .*, got .* at 127.0.0.1:.*the same files"),
            (stage_of(untied, 2, 2, (0, "lm_head")), "the same cuts in all stages, .*, got .* at 127.0.0.1"),
            (stage_of(untied, 2, 3), "stage 1 of 3 of the teacher at 127.0.0.1:.*, got stage 1 of 2 of the teacher"),
            (stage_of(untied, 3, 3), "stage 2 of 3 of the teacher at 127.0.0.1:.*, got stage 1 of 2 of the teacher"),
        ):
            with pytest.raises(BadInput, match=f"--previous: wanted {said}"), serving(stage, first):
                pass
        with pytest.raises(BadInput, match="the secret of this teacher, got one where it has none"):
            with serving(stage_of(untied, 2, 2), first, token="another"):
                pass


def test_a_stage_that_is_missing_is_named(untied: str) -> None:
    said = r"--previous: wanted stage 1 of 2 of the teacher that answers at 127.0.0.1:\d+, got .*refused"
    with listen("127.0.0.1", 0) as taken:
        where = taken.getsockname()
    with pytest.raises(BadInput, match=said):
        _place_before(where, stage_of(untied, 2, 2), "", 0.0, lambda said: None)


def test_whom_a_stage_answers(untied: str) -> None:
    second = stage_of(untied, 2, 2).part
    with chain(untied, 2) as servers:
        with pytest.raises(BadInput, match=r"the address of the teacher's last stage, 2 of 2, .* got that of stage 1"):
            with joined(servers[0]):
                pass
        with pytest.raises(BadInput, match="wanted students of stage 2 of 2 of the teacher, got stage 2 of 2"):
            with joined(servers[1], part=second):
                pass
        for wrong, said in (
            (second.model_copy(update={"source": "x"}), "the same teacher in all stages"),
            (second.model_copy(update={"stages": 3}), "stage 2 of 2 of the teacher for stage 1 of 2"),
        ):
            with pytest.raises(BadInput, match=f"wanted {said}"), joined(servers[0], part=wrong):
                pass


def test_students_at_a_time_get_their_own_answers_in_order(untied: str) -> None:
    whole = find_teacher(untied).module.eval()
    with chain(untied, 2) as servers:

        def learns(shift: int) -> bool:
            with joined(servers[-1]) as remote:
                batches = [{**BATCH, "input_ids": (IDS + shift + number) % 16} for number in range(6)]
                found = [remote.answer(one, valid()) for one in [remote.ask(one) for one in batches]]
            with torch.no_grad():
                wanted = [whole(input_ids=one["input_ids"]).logits.flatten(0, 1)[valid()] for one in batches]
            return all(torch.equal(a.logits(), b) for a, b in zip(found, wanted, strict=True))  # type: ignore[union-attr]

        with ThreadPoolExecutor(3) as students:
            assert list(students.map(learns, (0, 5, 9))) == [True] * 3
    assert servers[0].done.students == servers[1].done.students == 3


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"2.0": torch.zeros(2, 9, 16)}, "sent other tensors than stage 2 of 2 of the teacher receives"),
        ({"1.0": torch.zeros(2, 9, 16, dtype=torch.bfloat16)}, "sent other tensors than"),
        ({"1.0": torch.zeros(3, 9, 16)}, "tensors of at most 1152, got .* 1728"),
    ],
)
def test_what_a_stage_sends_is_checked(untied: str, sent: dict[str, Tensor], said: str) -> None:
    mine = stage_of(untied, 2, 2)
    part, ready = mine.part.model_copy(update={"stage": 1}), Ready(width=0, hidden=0, compute="", names=("input_ids",))
    facts = Facts(parameters=1, part=part)
    with pretending(packed(ready), packed(Border(number=0), sent), facts=facts) as where:
        with running(mine, PlaceBefore(where, part, facts.digest, "", SOON)) as server:
            with pytest.raises(TeacherLost, match=said), joined(server):
                pass


def test_a_stage_that_is_lost_is_named_with_its_address(untied: str) -> None:
    told = list[str]()
    with serving(stage_of(untied, 1, 2)) as first, ExitStack() as stack:
        at = _place_before(place(first), stage_of(untied, 2, 2), "", 0.0, lambda said: None)
        at = replace(at, patience=Patience(answer_s=60.0, again_s=0.1))
        server = TeacherServer(
            teacher=stage_of(untied, 2, 2).served(CPU, at), listener=listen("127.0.0.1", 0), token="", tell=told.append
        )
        thread = threading.Thread(target=server.serve)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.stop)
        links = [stack.enter_context(joined(server)) for _ in range(2)]
        for remote in links:
            remote.answer(remote.ask(BATCH), valid())
        first.stop()
        where, mine = "{}:{}".format(*place(first)), "{}:{}".format(*place(server))
        for remote in links:
            said = f"the teacher at {mine} was lost: stage 1 of 2 of the teacher at {where} was lost: .* for 0.1 s"
            with pytest.raises(TeacherLost, match=said):
                for _ in range(50):
                    remote.answer(remote.ask(BATCH), valid())
    assert f"student 1 at 127.0.0.1 was told: stage 1 of 2 of the teacher at {where} was lost" in " ".join(told)


@pytest.mark.nightly
def test_a_stage_that_comes_back_is_asked_again(untied: str) -> None:
    wanted = logits(find_teacher(untied).module)
    with ExitStack() as stack:
        again = ExitStack()
        first = again.enter_context(serving(stage_of(untied, 1, 2)))
        port = place(first)[1]
        last = stack.enter_context(serving(stage_of(untied, 2, 2), first))
        remote = stack.enter_context(joined(last))
        remote.answer(remote.ask(BATCH), valid())
        again.close()
        stack.enter_context(serving(stage_of(untied, 1, 2), port=port))
        found = remote.answer(remote.ask(BATCH), valid())
        assert not isinstance(found, KnownWords) and torch.equal(found.logits(), wanted)


def test_what_a_stage_cannot_compute_is_told(untied: str) -> None:
    with chain(untied, 2) as servers:
        for wrong, said in ((IDS + 1, "wanted tokens from 0 to 15, got 1 to 16"), (IDS[None], "cannot compute")):
            with joined(servers[-1]) as remote, pytest.raises(TeacherLost, match=said):
                remote.answer(remote.ask({"input_ids": wrong, "labels": IDS}), valid())


@pytest.mark.nightly
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_student_in_stages_learns_from_a_teacher_in_stages(
    pool: Pool, untied: str, tmp_path: Path, top_k: int
) -> None:
    plan = {"mesh": {"pipe": 2}, "cuts": ["embed", "layers.1"]}
    with chain(untied, 2) as servers:
        for name, ranks, more, of in (("one", 1, None, untied), ("two", 2, plan, named(servers[-1]))):
            train(pool, ranks, tmp_path / name, sections({"kl": {"teacher": of, "top_k": top_k}}, more, accumulate=2))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert [one.done.students for one in servers] == [1, 1]


def test_kinds_of_batches_are_not_kept_for_ever(untied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_stage, "_MOST_KINDS", 1)
    found = stage_of(untied, 1, 2).served(CPU, None)
    assert found.stage is not None
    reading = found.reading(terms(), {"input_ids": IDS})
    for length in (3, 4, 3):
        rows = {"input_ids": IDS[:, :length]}
        flow, _ = found.stage.way(reading, rows)
        known = found.stage.known(reading, rows)
        assert known is not None and known[0] is flow
        (ways,) = found.stage._ways.values()
        assert len(ways.known) == 1


def test_a_model_that_is_read_whole_is_said(tmp_path: Path) -> None:
    """Files of fused experts name tensors otherwise than the model does."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=16, num_key_value_heads=1, num_local_experts=2, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    (said,) = find_stage(str(tmp_path), AskedStage(1, 2), CPU).remarks
    assert "the whole model was read, and then given back: no file has model.layers.0.mlp.experts" in said


def test_what_a_stage_is_given_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_TEACHER_TOKEN", raising=False)
    for given, said in (
        ({"stage": "2"}, "--stage: wanted the number of a stage, from 1"),
        ({"stage": "1/" + "9" * 5000}, "--stage: wanted the number of a stage, from 1"),
        ({"stage": "3/2", "previous": "tcp://10.0.0.1:1"}, "--stage: wanted the number of a stage, from 1"),
        ({"stage": "2/2"}, "--previous: wanted the address of stage 1, which stage 2 asks, got none"),
        ({"stage": "1/2", "previous": "tcp://10.0.0.1:1"}, "--previous: wanted no address of a stage before"),
        ({"stage": "2/2", "previous": "10.0.0.1"}, "--previous: wanted tcp://HOST:PORT such as"),
        ({"stage": "2/2", "previous": "tcp://10.0.0.1"}, "--previous: wanted tcp://HOST:PORT such as"),
        ({"previous": "tcp://10.0.0.1:1"}, "--previous: wanted --stage with --previous"),
        ({"cuts": "0,1"}, "--cuts: wanted --stage with --cuts"),
    ):
        with pytest.raises(BadInput, match=said):
            serve_teacher("nowhere", "127.0.0.1:29600", **given)
