"""A rank that dies, stops or computes nonsense: who is named, how fast, and what the run does."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gossamer.sharding import read_tiers
from gossamer.store.checkpoint import latest_good
from system.command import Done, Place, ended, eventually, records


def held(place: Place, *more: str, plan: dict[str, Any] | None = None) -> subprocess.Popen[str]:
    """A run of two ranks that wait in the third or fourth step."""
    (place.folder / "hold").write_text("3")
    machines = {"processes": 2, "heartbeat_timeout_s": 1.0}
    config = place.config(model={"factory": "watched:make"}, train={"steps": 40}, machines=machines, plan=plan or {})
    process = place.start("train", config, *more, is_fresh=True)
    marks = [place.folder / f"held-{rank}" for rank in (0, 1)]
    eventually(lambda: all(mark.exists() for mark in marks) or process.poll() is not None, "both ranks are held")
    if process.poll() is not None:
        pytest.fail(str(ended(process)))
    return process


def go_on(place: Place) -> None:
    (place.folder / "hold").unlink()


def pid(place: Place, rank: int) -> int:
    return int((place.folder / f"pid-{rank}").read_text())


def page(done: Done) -> str:
    """The bordered block as one line."""
    assert done.code == 3, done.out[-2000:] + done.err[-2000:]
    assert "Traceback" not in done.err
    return " ".join(done.err.replace("|", " ").split())


def test_a_killed_rank_is_named_and_the_others_are_collateral(place: Place) -> None:
    process = held(place, "--json")
    os.kill(pid(place, 1), signal.SIGKILL)
    go_on(place)
    done = ended(process)
    said = page(done)
    for piece in ("first failing rank 1 on host", f"process {pid(place, 1)}", "killed by SIGKILL", "stood at step"):
        assert piece in said
    assert "lost their peer rank 0 on" in said or "ended by us rank 0 on" in said
    (run,) = place.runs()
    assert f"gossamer resume {run.relative_to(place.folder)}" in said
    assert done.last()["exit"] == 3
    assert not place.living()
    assert latest_good(run / "checkpoints")[0].step == 2


@pytest.mark.nightly
@pytest.mark.parametrize("group", ["none", "all"])
def test_a_killed_rank_with_states_in_tiers_is_named_and_the_run_goes_on_with_one(place: Place, group: str) -> None:
    """Both files stay as they were after the last step, and the next run there has the directory."""
    limits = dict.fromkeys(("device", "host", "file"), "64MB")
    tiers = {"tiers": {**limits, "directory": str(place.folder / "states"), "shard_group": group}}
    process = held(place, "--json", plan={"sharding": tiers})
    os.kill(pid(place, 1), signal.SIGKILL)
    go_on(place)
    said = page(ended(process))
    assert "first failing rank 1 on host" in said and "killed by SIGKILL" in said
    assert not place.living()
    states = place.folder / "states"
    made = {read_tiers(states, rank)[0] for rank in (0, 1)}
    assert max(made) - min(made) <= 1 and min(made) >= 2
    for rank in (0, 1):
        assert read_tiers(states, rank, updates=min(made))[0] == min(made)
    (run,) = place.runs()
    done = place.run("resume", str(run), "machines.processes=1", "train.steps=6")
    assert done.code == 0, done.err
    assert list(states.iterdir()) == []


@pytest.mark.nightly
def test_a_stopped_rank_is_named_with_its_last_operation(place: Place) -> None:
    process = held(place)
    os.kill(pid(place, 1), signal.SIGSTOP)
    said = page(ended(process))  # long before the exchange's timeout of two minutes
    for piece in ("first failing rank 1 on host", "stopped by a signal (SIGSTOP)", "no heartbeat for", "compute"):
        assert piece in said
    assert "last operation" in said
    assert not place.living()


MISBEHAVES = """
import os, time
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, tokens):
        if self.training and os.environ.get("RANK") == "RANKED":
            self.misbehave()
        return self.head(self.embed(tokens))

    calls = 0

    def misbehave(self):
        self.calls += 1
        if self.calls > FIRST:
            HOW
"""


def misbehaving(place: Place, how: str, *, rank: int, first: int = 12, timeout_s: float = 60.0) -> Path:
    """The configuration of a model that does this on a rank, from its so-many-th forward on."""
    text = MISBEHAVES.replace("RANKED", str(rank)).replace("FIRST", str(first)).replace("HOW", how)
    (place.folder / "net.py").write_text(text)
    machines = {"processes": 2, "timeout_s": timeout_s, "heartbeat_timeout_s": 1.0}
    return place.config(model={"factory": "net:Net"}, train={"steps": 40}, machines=machines)


@pytest.mark.parametrize(("rank", "first"), [pytest.param(1, 12, marks=pytest.mark.nightly), (0, 0)])
def test_a_rank_that_hangs_is_named_with_its_stacks_and_not_the_one_that_waits_for_it(
    place: Place, rank: int, first: int
) -> None:
    """In the middle of the run, and before its first step."""
    config = misbehaving(place, "time.sleep(1000)", rank=rank, first=first, timeout_s=10.0)
    said = page(place.run("train", config))
    assert f"first failing rank {rank} on host" in said
    assert f"rank {1 - rank} waits for it" in said and f"ended by us rank {1 - rank} on" in said
    assert "its stacks are at the end of its log at net.py:20 in misbehave" in said
    (run,) = place.runs()
    assert 'net.py", line 20 in misbehave' in (run / f"logs/rank-{rank:05d}.log").read_text()
    assert not place.living()


def test_an_error_of_the_user_s_has_its_place_and_its_victim_no_word_of_gloo_s(place: Place) -> None:
    said = page(place.run("train", misbehaving(place, 'raise ValueError("mine")', rank=1)))
    assert "first failing rank 1 on host" in said
    assert "likely cause ValueError: mine at net.py:20 in misbehave" in said
    (run,) = place.runs()
    (end,) = records(run, "end")
    assert (end["outcome"], end["message"]) == ("failed", "another rank was lost")
    assert ".cc:" not in (run / "logs/rank-00000.log").read_text()


def test_a_step_that_is_not_finite_is_rejected_counted_and_ends_the_run_where_the_policy_says_stop(
    place: Place,
) -> None:
    (place.folder / "nan").write_text("4")
    config = place.config(
        model={"factory": "watched:make"},
        train={"steps": 20, "checkpoint_every": 1, "on_nonfinite": "stop"},
        machines={"processes": 2},
    )
    said = page(place.run("train", config))
    for piece in ("StepRejected", "not finite on rank 0", "Lower the learning rate", "train.on_nonfinite: skip"):
        assert piece in said
    (run,) = place.runs()
    steps = records(run, "step")
    assert [step["committed"] for step in steps] == [True] * (len(steps) - 1) + [False]
    assert 2 < len(steps) < 20
    (event,) = [e for e in records(run, "event") if e["level"] == "error"]
    first, last = steps[-1]["samples"]
    assert f"samples {first}..{last - 1}" in event["message"]
    (end,) = records(run, "end")
    assert end["outcome"] == "failed"
    assert latest_good(run / "checkpoints")[0].step == len(steps) - 1


@pytest.mark.nightly
def test_a_run_that_skips_what_is_not_finite_ends_well_and_moves_nothing(place: Place) -> None:
    (place.folder / "nan").write_text("0")
    train = {"steps": 3, "on_nonfinite": "skip"}
    config = place.config(model={"factory": "watched:make"}, train=train)
    said = place.good("train", config, "--json").last()
    assert (said["outcome"], said["rejected_steps"]) == ("done", 3)
    (run,) = place.runs()
    assert [step["committed"] for step in records(run, "step")] == [False] * 3
    assert Path(said["checkpoint"]).name == "step-00000003"
    assert records(run, "evaluation")[-1]["loss"] > 0, "the parameters are still finite"
