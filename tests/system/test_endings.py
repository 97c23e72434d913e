"""How a run ends: done means saved and written down, and what comes after that changes nothing."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.job import record_writer
from gossamer.run import checkpoint_manager
from gossamer.spec.errors import BadInput, RunFailed
from gossamer.spec.plan import Plan
from gossamer.spec.records import Record, Step
from gossamer.store.checkpoint import save_attempt
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_lock import check_free
from system.command import InThisProcess, Place, ended, eventually, records

ROWS = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]


class Words(nn.Module):
    """A small model; `during` is called in every training forward with the number of those so far."""

    def __init__(self, during: Callable[[int], object] = lambda count: None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(4, 20)
        self.during, self.count = during, 0

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.count += 1
            self.during(self.count)
        return self.head(self.embed(input_ids))


def train(model: nn.Module, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    steps = {"steps": 4, "batch": 4, "checkpoint_every": 2, "evaluate_every": 0, **changes}
    config = {"train": steps, "run": {"directory": str(tmp_path / "runs"), "display": "quiet"}}
    return gossamer.train(model, ROWS, config)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody makes room here: no need to wait for it."""
    monkeypatch.setattr(checkpoint_manager, "_AGAIN_S", 0.0)
    monkeypatch.setattr(record_writer, "_AGAIN_S", 0.0)


def full_disk(monkeypatch: pytest.MonkeyPatch, step: str, times: int) -> None:
    """So often no shard of that step can be written."""
    write, left = save_attempt.write_shard, [times]

    def write_shard(path: Path, pieces: Any, info: dict[str, str]) -> Any:
        if info["step"] == step and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, pieces, info)

    monkeypatch.setattr(save_attempt, "write_shard", write_shard)


def test_a_last_save_that_fails_is_no_end_but_the_module_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, "4", times=2)
    model = Words()
    before = model.head.weight.detach().clone()
    with pytest.raises(RunFailed, match=r"trained to step 4, but .* the disk is full.* newest checkpoint is of step 2"):
        train(model, tmp_path)
    assert not torch.equal(model.head.weight, before)
    (run,) = (tmp_path / "runs").iterdir()
    assert [(s["step"], bool(s["error"])) for s in records(run, "checkpoint")] == [(2, False), (4, True), (4, True)]
    (end,) = records(run, "end")
    assert (end["outcome"], end["step"]) == ("failed", 4)


def test_a_last_save_that_fails_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, "4", times=1)
    said = train(Words(), tmp_path)
    assert (said["outcome"], said["steps"], said["checkpoint_step"]) == ("done", 4, 4)


@pytest.mark.parametrize("times", [1, 2])
def test_a_plan_that_finds_no_room_is_written_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Before training, or at a change of exchange: records and checkpoints that find none do not end a run either."""
    write, left = RunDirectory.keep_plan, [times]

    def keep_plan(directory: RunDirectory, plan: Plan) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write(directory, plan)

    monkeypatch.setattr(RunDirectory, "keep_plan", keep_plan)
    said = train(Words(), tmp_path)
    assert (said["outcome"], said["steps"]) == ("done", 4)
    (run,) = (tmp_path / "runs").iterdir()
    assert RunDirectory(run).plan() is not None
    told = [(e["level"], e["message"]) for e in records(run, "event") if "plan that is in force" in e["message"]]
    assert [level for level, _ in told] == ["warning", "info"], "each once"
    assert "No space left on device; the training continues, and the plan is written with" in told[0][1]


def test_a_last_checkpoint_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_manager, "list_checkpoints", lambda directory: (2,))
    with pytest.raises(RunFailed, match=r"the checkpoint of step 4 is not in .* any more"):
        train(Words(), tmp_path)


class Disk:
    """A run directory whose records cannot be written from step `first` on, so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, times: int) -> None:
        self.append, self.first, self.left, self.is_full = RunDirectory.append, first, times, False
        monkeypatch.setattr(RunDirectory, "append", lambda directory, record: self.write(directory, record))

    def write(self, directory: RunDirectory, record: Record) -> None:
        self.is_full = self.is_full or (isinstance(record, Step) and record.step == self.first)
        if self.is_full and self.left > 0:
            self.left -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.append(directory, record)


def test_records_that_found_no_room_are_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Words(), tmp_path / "all")
    Disk(monkeypatch, first=2, times=3)
    said = train(Words(), tmp_path / "late")
    assert (said["outcome"], said["steps"]) == ("done", 4)
    found = [[r.kind for r in RunDirectory(next((tmp_path / d / "runs").iterdir())).records()] for d in ("all", "late")]
    assert sorted(found[0]) == sorted(found[1])


def test_an_end_that_cannot_be_written_down_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, first=2, times=10**6)
    with pytest.raises(
        RunFailed, match=r"the run ended \(done\) at step 4 and its checkpoint is saved, but \d+ records are not"
    ):
        train(Words(), tmp_path)


def test_a_model_that_ends_the_process_does_not_end_the_callers_in_silence(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"SystemExit: 0"):
        train(Words(lambda count: sys.exit(0) if count == 2 else None), tmp_path)


def test_a_run_in_the_callers_own_process_is_held_while_it_trains(tmp_path: Path) -> None:
    told: list[str] = []

    def during(count: int) -> None:
        with pytest.raises(BadInput) as caught:
            check_free(next((tmp_path / "runs").iterdir()))
        told.append(str(caught.value))

    said = train(Words(during), tmp_path)
    assert said["outcome"] == "done"
    assert told and all(f"is being trained by process {os.getpid()} on host" in one for one in told)
    check_free(Path(said["directory"]))


LATE = """
import atexit, os, time
from pathlib import Path
from watched import make as watched

def wait():
    while Path("late").exists():
        time.sleep(0.01)

def make():
    atexit.register(wait)
    return watched()
"""


@pytest.mark.nightly
def test_a_stop_or_a_kill_after_the_end_was_written_down_is_no_failure(place: Place) -> None:
    (place.folder / "late.py").write_text(LATE)
    (place.folder / "late").touch()
    process = place.start("train", place.config(model={"factory": "late:make"}, machines={"processes": 2}))
    eventually(lambda: bool(place.runs()) and (place.runs()[0] / "records.jsonl").exists(), "its records")
    eventually(lambda: process.poll() is not None or bool(records(place.runs()[0], "end")), "its end")
    process.send_signal(signal.SIGTERM)
    os.kill(int((place.folder / "pid-1").read_text()), signal.SIGKILL)
    (place.folder / "late").unlink()
    done = ended(process)
    assert done.code == 0, done.err
    assert "done at step 4" in done.out


def test_a_run_that_is_being_trained_is_left_alone(place: Place, inside: InThisProcess) -> None:
    (place.folder / "hold").write_text("3")
    config = place.config(model={"factory": "watched:make"}, machines={"processes": 1})
    process = place.start("train", config)
    eventually(lambda: (place.folder / "held-0").exists() or process.poll() is not None, "it is held")
    (run,) = place.runs()
    before = (run / "run.yaml").read_bytes(), (run / "records.jsonl").read_bytes()
    for argv in (("resume", run, "train.steps=3"), ("train", config, "--resume", "auto")):
        refused = inside.run(place, *argv)
        assert refused.code == 2
        assert f"is being trained by process {process.pid} on host" in refused.err
    assert before == ((run / "run.yaml").read_bytes(), (run / "records.jsonl").read_bytes())
    (place.folder / "hold").unlink()
    assert ended(process).code == 0
    check_free(run)


def test_ranks_that_all_leave_in_a_save_have_not_finished(place: Place) -> None:
    (place.folder / "leaves.py").write_text(
        "import os\n"
        "from watched import make\n"
        "from gossamer.run.checkpoint_manager import CheckpointManager\n"
        "save = CheckpointManager.save\n"
        "def leave(self, progress, *, last=False):\n"
        "    os._exit(0) if progress.step == 4 else save(self, progress, last=last)\n"
        "CheckpointManager.save = leave\n"
    )
    done = place.run("train", place.config(model={"factory": "leaves:make"}, machines={"processes": 2}))
    said = " ".join(done.err.replace("|", " ").split())
    assert done.code == 3, done.out
    assert "ended without an error message at step 4, save: exit code 0 before its work was done" in said
    assert "done" not in done.out and "gossamer sample" not in done.out
