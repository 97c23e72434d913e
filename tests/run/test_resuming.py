"""Which checkpoint the ranks agree on: the newest that is good in every directory, read by one rank of each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gossamer.run.checkpoint_directory import CheckpointDirectory
from gossamer.run.checkpoint_manager import FORMAT, CheckpointManager
from gossamer.spec.errors import BadInput
from gossamer.store.checkpoint import list_checkpoints
from store.crew import good, halves, model, save

SHARD = "rank-00001.safetensors"


def saved(directory: Path, steps: list[int]) -> Path:
    for step in steps:
        good(save(directory, step, halves(model(step)), {"step": step, "format": FORMAT}, keep=9))
    return directory


def spoil(directory: Path, step: int) -> None:
    (directory / f"step-{step:08d}" / SHARD).write_bytes(b"x")


def test_one_rank_reads_and_all_take_its_word(pool, tmp_path: Path) -> None:
    directory = saved(tmp_path, [2, 4, 6])
    spoil(directory, 6)
    answers = pool.run("run.jobs:search", 3, directories=[str(directory)] * 3)
    assert [answer["step"] for answer in answers] == [4, 4, 4]
    assert [answer["bad"] for answer in answers] == [[6], [], []], "only the reader knows what is wrong"
    assert [answer["verified"] for answer in answers] == [1, 0, 0]


def test_hosts_agree_on_the_newest_that_is_good_on_all(pool, tmp_path: Path) -> None:
    here, there = saved(tmp_path / "a", [2, 4, 6]), saved(tmp_path / "b", [2, 4, 8])
    spoil(there, 4)
    answers = pool.run("run.jobs:search", 3, directories=[str(here), str(here), str(there)])
    assert [answer["step"] for answer in answers] == [2, 2, 2]
    assert [answer["bad"] for answer in answers] == [[], [], [4]], "8 and 6 are good: they are left alone"
    answers = pool.run("run.jobs:search", 2, directories=[str(here), str(there)], until=3)
    assert [answer["step"] for answer in answers] == [2, 2]


def test_later_checkpoints_of_one_host_are_set_aside_for_they_are_of_another_history(pool, tmp_path: Path) -> None:
    here, there = saved(tmp_path / "a", [2, 4, 6, 8]), saved(tmp_path / "b", [2, 4])
    spoil(here, 8)
    spoil(there, 4)
    told = pool.run("run.jobs:resumed", 3, directories=[str(here), str(here), str(there)])
    assert list_checkpoints(here) == list_checkpoints(there) == (2,)
    assert sorted(path.name for path in here.iterdir() if "." in path.name) == [
        f"step-0000000{step}.aside-0" for step in (4, 6, 8)
    ], "nothing is thrown away"
    assert told[0][-1] == (
        "goes on from step 2, the newest that is good on every host; the later checkpoints are kept as "
        "step-00000006.aside-0, step-00000004.aside-0, which nothing reads: remove them when you do not need them"
    )
    assert told[1] == []
    assert [said.split("; ")[-1] for said in told[2]] == ["the damaged one is now step-00000004.aside-0"]


def test_without_any_checkpoint_nobody_resumes(pool, tmp_path: Path) -> None:
    assert pool.run("run.jobs:search", 2, directories=[str(tmp_path / "a"), str(tmp_path / "b")]) == [None, None]


def test_one_that_fails_lets_nobody_wait(pool, tmp_path: Path) -> None:
    here, there = saved(tmp_path / "a", [2]), saved(tmp_path / "b", [2, 4])
    for step in (2, 4):
        spoil(there, step)
    answers = pool.attempt("run.jobs:search", 3, directories=[str(here), str(there), str(there)])
    assert [answer["kind"] for answer in answers] == ["PeerLost", "CheckpointMismatch", "PeerLost"]
    assert "rank 1 could not read its checkpoints" in answers[0]["error"]


@pytest.mark.parametrize("steps", [[], [8]])
def test_a_host_without_what_the_others_have_is_told_to_all(pool, tmp_path: Path, steps: list[int]) -> None:
    here, there = saved(tmp_path / "a", [2, 4]), saved(tmp_path / "b", steps)
    answers = pool.attempt("run.jobs:search", 2, directories=[str(here), str(there)])
    assert [answer["kind"] for answer in answers] == ["BadInput"] * 2
    assert "copy the checkpoints of another host to that host" in answers[1]["error"]


def test_a_checkpoint_of_another_format_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    saver = CheckpointManager(directory=CheckpointDirectory(path=tmp_path), rank=0, sink=lambda _: None, identity={})
    older = SimpleNamespace(folder=tmp_path, meta={"format": 1, "gossamer": "0.0.9"})
    with pytest.raises(BadInput, match=r"wanted a checkpoint of format 2, got 1\. Resume with gossamer 0\.0\.9"):
        saver._check(older)
