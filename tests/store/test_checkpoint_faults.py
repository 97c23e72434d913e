"""Full disks and killed processes: at every instant there is a whole checkpoint, and no garbage stays."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.store.checkpoint import CheckpointWriter, latest_good, list_checkpoints, open_checkpoint, save_attempt
from store.crew import finish, good, left_over, save, whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.strip()}")
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr(save_attempt, "_SETTLE_S", 20.0)  # ranks here are threads of a busy machine
        yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_and_no_garbage(small_disk: Path) -> None:
    writer = CheckpointWriter(small_disk, 0, 1)
    small, large = torch.ones(150_000), torch.ones(400_000)  # 0.6 and 1.6 MB
    writer.save(1, [whole("w", small)], {})
    good(finish(writer))
    writer.save(2, [whole("w", large)], {})
    (result,) = finish(writer)
    assert not result.ok
    assert (
        "step 2 was not saved: the disk is full: rank 0 needs 1.6 MB" in result.error and "MB are free" in result.error
    )
    assert list_checkpoints(small_disk) == (1,) and left_over(small_disk) == []
    open_checkpoint(small_disk, 1).verify()
    writer.save(3, [whole("w", small)], {})  # training goes on, and so does saving
    good(finish(writer))


def test_a_full_disk_of_one_rank_is_told_to_all(small_disk: Path) -> None:
    results = save(small_disk, 1, [[whole("a", torch.ones(10))], [whole("b", torch.ones(800_000))]])
    assert "rank 1: the disk is full: rank 1 needs 3.2 MB" in results[0].error
    assert not results[1].ok and left_over(small_disk) == [] and list_checkpoints(small_disk) == ()


def test_a_rank_that_finds_the_disk_full_says_which_rank_does_not_fit(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 needs 40 B, and finds the disk as rank 1 has filled it."""
    real_write = save_attempt.write_shard

    def write_while_full(path: Path, *rest: Any) -> Any:
        if path.name.startswith("rank-00000"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(path, *rest)

    monkeypatch.setattr(save_attempt, "write_shard", write_while_full)
    results = save(small_disk, 1, [[whole("a", torch.ones(10))], [whole("b", torch.ones(800_000))]])
    for part in ("the disk is full: rank 0 needs 40 B", "rank 1: the disk is full: rank 1 needs 3.2 MB"):
        assert part in results[0].error
    assert not results[1].ok and left_over(small_disk) == [] and list_checkpoints(small_disk) == ()


def _save_for_ever(directory: Path) -> None:
    """In a child: save step after step, every tensor filled with its step."""
    newest = max(list_checkpoints(directory), default=0)
    writer = CheckpointWriter(directory, 0, 1)
    for step in range(newest + 1, newest + 10_000):
        fill = float(step)
        writer.save(
            step, [whole(f"w{i}", torch.full((20_000,), fill)) for i in range(4)], {"step": step}, patience_s=None
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    good(save(tmp_path, 1, [[whole("w0", torch.ones(20_000))]]))
    newest, rng = 1, random.Random(0)
    window_s, kills = 0.06, 0
    while kills < 25 or newest <= 10:  # a busy machine takes longer to save anything
        kills += 1
        child = os.fork()
        if child == 0:
            try:
                _save_for_ever(tmp_path)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.005, window_s))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        found, problems = latest_good(tmp_path)
        assert problems == {} and found.step >= newest
        window_s *= 1.3 if found.step == newest else 1.0
        newest = found.step
        assert (found.read("w0") == float(newest)).all()
    CheckpointWriter(tmp_path, 0, 1)
    assert left_over(tmp_path) == []
