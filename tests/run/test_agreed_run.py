"""Ranks of a launcher are in one run: rank 0 finds it, and whoever looks later, or not at all, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gossamer.api import started_run
from gossamer.api.startup import keep_settings
from gossamer.comm.patience import PatientStore
from gossamer.job.agreed_run import agreed_run
from gossamer.launch.environment import LauncherRank, MasterAddress
from gossamer.settings import Resolved, load
from gossamer.spec.errors import BadInput, PeerLost
from gossamer.view.run_directory import RunDirectory
from ports import free_port
from system.command import records, under_torchrun

Begin = Callable[[], tuple[RunDirectory, bool]]


def place(rank: int, ranks: int = 2) -> LauncherRank:
    return LauncherRank(
        rank=rank,
        ranks=ranks,
        local_rank=rank,
        local_ranks=ranks,
        host=0,
        hosts=1,
        hostname="",
        launcher="torchrun",
        master=MasterAddress(host="", port=0),
    )


def everywhere(begin: Begin, *, late_s: float = 0.0, timeout_s: float = 20.0, there: int = 3) -> list[Any]:
    """What each of so many of three ranks is told, of which all but the first come late."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        time.sleep(late_s if rank else 0.0)
        try:
            return agreed_run(place(rank, 3), PatientStore(store, timeout_s), begin, timeout_s=timeout_s)
        except (BadInput, PeerLost) as error:
            return error

    with ThreadPoolExecutor(there) as pool:
        return [*pool.map(one, range(there))]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    monkeypatch.chdir(tmp_path)
    for name, value in under_torchrun(0, 3, 1).items():
        monkeypatch.setenv(name, f"{value}")
    return load(None, given={"run": {"name": "one"}})


def test_a_late_rank_begins_the_run_that_the_first_has_begun(given: Resolved) -> None:
    """By itself it would find settings like its own, and resume."""

    def begin() -> tuple[RunDirectory, bool]:
        found = started_run.run_directory(given, "auto")
        keep_settings(found[0], given)
        return found

    assert everywhere(begin, late_s=0.3) == [(RunDirectory(Path("runs/one")), False)] * 3
    assert started_run.run_directory(given, "auto") == (RunDirectory(Path("runs/one")), True), "as it would have"
    assert everywhere(begin, late_s=0.3) == [(RunDirectory(Path("runs/one")), True)] * 3


def test_what_rank_0_refuses_ends_all_ranks(given: Resolved) -> None:
    keep_settings(RunDirectory(Path("runs/one")), given)
    told = everywhere(lambda: started_run.run_directory(given, None))
    assert [type(one) for one in told] == [BadInput] * 3 and len({str(one) for one in told}) == 1
    assert "run.name: wanted a new run, or --resume auto, got runs/one, which is there already" in str(told[0])


def test_a_rank_that_does_not_come_is_named() -> None:
    began_s = time.monotonic()
    told = everywhere(lambda: (RunDirectory(Path("one")), False), timeout_s=0.5, there=2)
    assert [type(one) for one in told] == [PeerLost] * 2
    assert "no word of rank 2 before the run within 0.5 s" in str(told[0])
    assert time.monotonic() - began_s < 20


def test_ranks_of_which_one_resumes_are_told(pool: Any) -> None:
    """As on hosts with disks of their own, of which one has lost its run."""
    for answer in pool.attempt("run.launch_jobs:one_resumes", 2):
        assert answer["kind"] == "BadInput", answer
        assert "the ranks do not agree about the run to go on with: rank 0 and rank 1 differ" in answer["error"]


def test_a_program_does_not_train_over_a_run_that_is_there(pool: Any, tmp_path: Path) -> None:
    def both(**more: Any) -> list[dict[str, Any]]:
        found = pool.run("run.launch_jobs:named", 2, folder=str(tmp_path), port=free_port(), **more)
        assert isinstance(found, list)
        return found

    run = tmp_path / "one"
    assert both() == [{"steps": 2, "said": ""}] * 2
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    for answer in both(steps=1):
        assert 'run.name: wanted a new run, or resume="auto", got ' in answer["said"], answer
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert both(steps=4, resume="auto") == [{"steps": 4, "said": ""}] * 2
    assert [one["step"] for one in records(run, "start")] == [0, 2]


def test_a_program_that_was_corrected_has_the_name_again(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "arguments.json").write_text("mine")
    for answer in pool.run("run.launch_jobs:named", 2, folder=str(tmp_path), port=free_port(), batch=1000):
        assert "train.batch" in answer["said"], answer
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["arguments.json"]
    done = pool.run("run.launch_jobs:named", 2, folder=str(tmp_path), port=free_port())
    assert done == [{"steps": 2, "said": ""}] * 2
