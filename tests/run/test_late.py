"""Islands that a round does not wait for, as whole runs: what is told, stops, resumes, bad ends."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gossamer.store.checkpoint import open_checkpoint
from pool import Pool
from run.test_sharding import records

WAYS: dict[str, Any] = {
    "local_sgd": {"local_sgd": {"sync_every": 4, "straggler_timeout_s": 0.3}},
    "streaming": {
        "diloco": {
            "sync_every": 4,
            "fragments": 2,
            "sync_delay": 2,
            "keep_local_progress": True,
            "outer_optimizer": "average",
            "average_second_moments_every": 1,
            "straggler_timeout_s": 0.3,
        }
    },
}
each_way = pytest.mark.parametrize("name", WAYS)


def sections(written: Any, **more: Any) -> dict[str, Any]:
    return {"plan": {"sync": written}, **more}


def updates(folder: Path, step: int) -> list[int]:
    """By rank, how many its island has made."""
    kept = open_checkpoint(folder / "run" / "checkpoints", step)
    return [int(kept.read("island/updates", replica=rank)) for rank in range(2)]


@each_way
def test_a_late_island_goes_on_from_where_the_others_are(pool: Pool, tmp_path: Path, name: str) -> None:
    """What it has left out counts neither as an update nor as a sample, and a reader of the run is told."""
    given = {"folder": str(tmp_path), "steps": 20, "dropout": 0.1, "sections": sections(WAYS[name])}
    found = pool.run("run.jobs:train", 2, held_up=[1, 5, 13], **given)
    assert found[0]["digest"] == found[1]["digest"]
    said = [one for one in records(tmp_path, "event") if "was late" in one["message"]]
    assert said and all("the island of ranks [1] was late" in one["message"] for one in said)
    assert {8, 12} <= {one["step"] for one in said} and all(one["level"] == "warning" for one in said)
    assert updates(tmp_path, 20)[0] == 20 and 12 <= updates(tmp_path, 20)[1] <= 14
    heard = records(tmp_path, "islands")
    late = next(one for one in heard if one["step"] == 8)
    assert late["weights"][1] == 0 < late["weights"][0] and sum(one["weights"][1] for one in heard) > 0
    assert [one["step"] for one in records(tmp_path, "step")] == list(range(1, 21))


@each_way
def test_all_stop_at_the_end_of_a_round(pool: Pool, tmp_path: Path, name: str) -> None:
    """Asked of whoever, and while an island is late; then it goes on."""
    given = {"folder": str(tmp_path), "steps": 20, "sections": sections(WAYS[name])}
    found = pool.run("run.jobs:train", 2, until=8, held_up=[1, 3, 6], **given)
    assert found[0]["ended"] == found[1]["ended"] and "stopped as asked after step 8" in found[0]["ended"]
    again = pool.run("run.jobs:train", 2, resume=True, **given)
    assert again[0]["digest"] == again[1]["digest"] and not again[0]["ended"]


@each_way
def test_a_run_goes_on_bit_for_bit_from_inside_a_round(pool: Pool, tmp_path: Path, name: str) -> None:
    patient = {kind: {**settings, "straggler_timeout_s": 30.0} for kind, settings in WAYS[name].items()}
    given = {"folder": str(tmp_path), "steps": 10, "dropout": 0.1}
    given["sections"] = sections(patient, train={"checkpoint_every": 6})
    whole = pool.run("run.jobs:train", 2, **given)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000010")
    again = pool.run("run.jobs:train", 2, resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]
    assert not any("was late" in one["message"] for one in records(tmp_path, "event"))


def test_what_it_left_out_is_no_update_also_at_another_pace(pool: Pool, tmp_path: Path) -> None:
    """Stopped, and told to make a quarter of the steps."""
    given = {"folder": str(tmp_path), "steps": 32}
    first = {"sections": sections(WAYS["local_sgd"]), "until": 15, "held_up": [1, 3, 13]}
    pool.run("run.jobs:train", 2, **given, **first)
    before = updates(tmp_path, 16)
    assert before[0] == 16 and before[1] <= 16 - 8
    slower = sections({"local_sgd": {"sync_every": 4, "local_steps": [4, 1]}})
    found = pool.run("run.jobs:train", 2, resume=True, fresh_plan=True, sections=slower, **given)
    assert found[0]["digest"] == found[1]["digest"]
    assert updates(tmp_path, 32) == [32, before[1] + 4]


def test_states_sharded_in_an_island(pool: Pool, tmp_path: Path) -> None:
    given = sections(WAYS["local_sgd"], machines={"islands": [[0, 1], [2]]})
    given["plan"]["sharding"] = {"zero2": {"shard_group": "island"}}
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=16, held_up=[1, 5, 9], sections=given)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    said = [one["message"] for one in records(tmp_path, "event") if "was late" in one["message"]]
    assert said and all("ranks [0, 1]" in one for one in said)


def test_whoever_waits_is_told_when_another_gives_up(pool: Pool, tmp_path: Path) -> None:
    given = sections({"local_sgd": {"sync_every": 50, "straggler_timeout_s": 30.0}}, train={"on_nonfinite": "stop"})
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=6, bad=9, sections=given)
    assert answers[0]["kind"] == "PeerLost"
    assert "not finite on rank 1" in answers[1]["result"]["ended"]
