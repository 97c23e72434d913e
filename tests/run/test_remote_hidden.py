"""States of a served teacher's blocks: what one beside the student gives, bit for bit, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.job.divided_teacher import AskedStage, find_stage
from gossamer.job.found_teacher import find_teacher
from gossamer.loss.hidden import Hidden
from gossamer.loss.kl import Kl
from gossamer.run.hidden_states import BlockTaps
from gossamer.run.remote_teacher.frames import packed
from gossamer.run.remote_teacher.link import TeacherLink
from gossamer.run.remote_teacher.messages import BlockState, Facts, Ready, Rows
from gossamer.run.remote_teacher.server import TeacherServer
from gossamer.run.remote_teacher.states import SentStates
from gossamer.run.remote_teacher.teacher import RemoteTeacher
from gossamer.spec.errors import BadInput, RunFailed, WireMismatch
from pool import Pool
from run.test_distillation import losses, records, saved, sections, train
from run.test_divided_teacher import chain
from run.test_hidden import MI, hidden
from run.test_remote_teacher import (
    BATCH,
    CPU,
    HEAD,
    IDS,
    SOON,
    Capped,
    Changing,
    joined,
    named,
    place,
    pretending,
    serving,
    terms,
    valid,
)

BLOCKS = ("model.layers.0", "model.layers.1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("teacher"), 16)


@pytest.fixture
def server(teacher: str) -> Iterator[TeacherServer]:
    with serving(teacher) as found:
        yield found


def tapped(teacher: str) -> dict[str, Tensor]:
    """Return the rows of both blocks of a teacher in this process."""
    module = find_teacher(teacher).module.eval()
    taps = BlockTaps.on("", module, BLOCKS)
    with torch.no_grad():
        module(input_ids=IDS)
    return {path: one.flatten(0, 1)[valid()] for path, one in taps.taken().items()}


def taken(remote: RemoteTeacher) -> dict[str, Tensor]:
    """Return the states in the answer to a question."""
    remote.answer(remote.ask(BATCH), valid())
    return dict(remote.states.taken(BATCH, valid()))


def test_a_student_learns_what_it_does_beside_its_teacher(
    pool: Pool, teacher: str, server: TeacherServer, tmp_path: Path
) -> None:
    """On two ranks, unequal labels, micro-batches; over a stop and a resume; with tokens that are drawn."""
    given = {name: sections(hidden(of, MI), accumulate=2) for name, of in (("here", teacher), ("there", named(server)))}
    here = train(pool, 2, tmp_path / "here", given["here"])
    train(pool, 2, tmp_path / "there", given["there"], until=3)
    there = train(pool, 2, tmp_path / "there", given["there"], resume=True)
    assert [one["digest"] for one in there] == [one["digest"] for one in here]
    assert losses(tmp_path / "there") == losses(tmp_path / "here")
    said = [one["message"] for one in records(tmp_path / "there", "event")]
    assert any("and the states of 2 blocks: 192 bytes a token" in one for one in said)
    assert any("hidden states of layers.1 with model.layers.0, layers.3 with model.layers.1" in one for one in said)


@pytest.mark.nightly
@pytest.mark.parametrize("more", [{}, {"by": "cosine", "layers": "last"}, {"layers": "emd", "pairs": 0}])
def test_every_pairing_learns_the_same(
    pool: Pool, teacher: str, server: TeacherServer, tmp_path: Path, more: dict[str, Any]
) -> None:
    found = {}
    for name, of in (("here", teacher), ("there", named(server))):
        for ranks, precision in ((1, "fp32"), (2, "bf16")):
            given = sections(hidden(of, **{"by": "mse", **more}), precision=precision, accumulate=2)
            runs = train(pool, ranks, tmp_path / f"{name}{ranks}", given, steps=3)
            found[name, ranks] = runs[0]["digest"], losses(tmp_path / f"{name}{ranks}")
    assert found["there", 1] == found["here", 1] and found["there", 2] == found["here", 2]


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_states_are_those_of_the_whole_teacher(teacher: str, server: TeacherServer, stages: int) -> None:
    """Bit for bit; in three stages those of the first block cross two borders."""
    wanted = tapped(teacher)
    with chain(teacher, stages) as servers, joined(servers[-1], blocks=BLOCKS) as remote:
        for _ in range(2):
            found = taken(remote)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[path], wanted[path]) for path in BLOCKS)
        assert remote.link.facts.blocks == BLOCKS
        assert remote.bytes_per_token == 3 * 16 * 4
    with joined(server, blocks=BLOCKS[1:], top_k=3) as remote:
        assert torch.equal(taken(remote)[BLOCKS[1]], wanted[BLOCKS[1]]) and remote.bytes_per_token == 28 + 64


def test_two_students_get_the_states_that_each_asked_for(teacher: str, server: TeacherServer) -> None:
    wanted = tapped(teacher)
    with joined(server, blocks=BLOCKS[:1]) as one, joined(server) as none:
        first, second = one.ask(BATCH), none.ask(BATCH)
        one.answer(first, valid())
        none.answer(second, valid())
        assert torch.equal(one.states.taken(BATCH, valid())[BLOCKS[0]], wanted[BLOCKS[0]])
        assert not none.states.held
    module = server.teacher.module
    assert not any(block._forward_hooks for block in map(module.get_submodule, BLOCKS))


def test_a_block_that_is_not_there_is_refused_with_those_that_are(server: TeacherServer) -> None:
    with pytest.raises(BadInput, match=r"blocks of the teacher: model.layers.0, model.layers.1, got model.layers.7: "):
        with joined(server, blocks=("model.layers.7",)):
            pass


def test_a_student_that_is_too_deep_is_refused_with_the_names(
    pool: Pool, server: TeacherServer, tmp_path: Path
) -> None:
    said = r"got 4 in the student and 2 in the teacher \(model.layers.0, model.layers.1\)"
    with pytest.raises(AssertionError, match=said):
        train(pool, 1, tmp_path, sections(hidden(named(server), pairs=0)))


def test_a_teacher_without_blocks_says_so(pool: Pool, tmp_path: Path) -> None:
    with serving(Capped()) as found:
        said = "one list of repeated blocks in the teacher .*, got none: use the distillation of outputs alone"
        with pytest.raises(AssertionError, match=said):
            train(pool, 1, tmp_path, sections(hidden(named(found))))


class Pooling(Changing):
    """A classifier of rows, whose block holds padded tokens; its forward reads no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.embed(input_ids)
        for one in self.layers:
            rows = one(rows)
        logits: Tensor = self.head(rows.mean(1))
        return logits


def test_padded_rows_are_pooled_where_the_teacher_is() -> None:
    """A row with one label has the mean over its tokens without padding, as beside the student."""
    from gossamer.run.hidden_states import TappedStates

    torch.manual_seed(0)
    module, mask, every = Pooling().eval(), torch.ones(2, 9, dtype=torch.int64), torch.arange(2)
    mask[0, 6:] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": torch.tensor([3, 1])}
    taps = BlockTaps.on("", module, ("layers.1",))
    with torch.no_grad():
        module(IDS)
    wanted = TappedStates(taps).taken(batch, every)["layers.1"]
    taps.remove()
    with serving(module) as found:
        link = TeacherLink(*place(found), token="", patience=SOON)
        remote = RemoteTeacher.of(link, terms(dims=2, top_k=3, blocks=("layers.1",)), batch, CPU)
        assert remote.ready.names == ("input_ids", "attention_mask")
        remote.answer(remote.ask(batch), every)
        assert torch.equal(remote.states.taken(batch, every)["layers.1"], wanted)
        link.close()


def test_states_are_bounded_by_name(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.run.remote_teacher.states._MOST_BYTES", 1000)
    with pytest.raises(BadInput, match=r"states of at most 1 kB for a micro-batch, got 2.3 kB of 2 blocks: set pairs"):
        with joined(server, blocks=BLOCKS):
            pass


STATE = BlockState(block="a", width=4, dtype="float32")
OFFER = Ready(width=16, hidden=8, compute="", names=("input_ids",), states=(STATE,))
ROWS = {"hidden": torch.zeros(16, 8)}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "other tensors than those of 16 tokens"),
        ({"state.0": torch.zeros(8, 8)}, "other tensors than those of 16 tokens"),
        ({"state.0": torch.zeros(16, 4, dtype=torch.int32)}, "other tensors than those of 16 tokens"),
        ({"state.0": torch.zeros(16, 5)}, "tensors of at most 768, got"),
    ],
)
def test_states_are_checked(state: dict[str, Tensor], said: str) -> None:
    facts = Facts(parameters=1, blocks=("a",))
    with pretending(packed(OFFER, HEAD), packed(Rows(number=0), {**ROWS, **state}), facts=facts) as (host, port):
        link = TeacherLink(host, port, token="", patience=SOON)
        try:
            remote = RemoteTeacher.of(link, terms(blocks=("a",)), BATCH, CPU)
            with pytest.raises(RunFailed, match=said):
                remote.answer(remote.ask(BATCH), valid())
        finally:
            link.close()


def test_an_offer_of_other_blocks_is_refused() -> None:
    with pretending(packed(OFFER, HEAD)) as (host, port):
        link = TeacherLink(host, port, token="", patience=SOON)
        try:
            with pytest.raises(WireMismatch, match="offers states of other blocks than"):
                RemoteTeacher.of(link, terms(blocks=("b",)), BATCH, CPU)
        finally:
            link.close()


def test_a_stage_has_its_own_blocks(teacher: str) -> None:
    found = find_stage(teacher, AskedStage(1, 2), CPU).served(CPU, None)
    assert found.stage is not None and found.stage.blocks(BLOCKS) == BLOCKS[:1]
    assert Hidden(output=Kl(teacher="tcp://10.0.0.1:29600")).pairs == 0
    assert SentStates().taken(BATCH, valid()) == {}
