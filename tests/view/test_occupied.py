"""Who holds a run directory: whoever comes second is told, and a holder that is gone leaves nothing that blocks."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gossamer.spec.errors import BadInput
from gossamer.view import run_lock
from gossamer.view.run_lock import Holder, check_free, held

HOLD = "import sys, time; from pathlib import Path; from gossamer.view.run_lock import held\n"
HOLD += "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)\n"


@contextmanager
def other(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)


def no_beats_for(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(directory / ".lock.beat", (then, then))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_second_is_told_of_the_first_until_that_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with other(run) as process:
        with pytest.raises(
            BadInput, match=rf"is being trained by process {process.pid} on host {socket.gethostname()}"
        ):
            check_free(run)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with held(run):  # what it has left behind is no obstacle
            assert names(run) == [".lock"]
    assert names(run) == []


def test_one_lock_for_each_directory_also_within_a_process(tmp_path: Path) -> None:
    with held(tmp_path / "a"), held(tmp_path / "b"):
        with pytest.raises(BadInput, match=f"process {os.getpid()} on host"):
            check_free(tmp_path / "a")
        assert run_lock._read(tmp_path / "a" / ".lock") is not None, "the refused one has taken nothing away"
    check_free(tmp_path / "a")


def test_it_is_given_back_whatever_ended_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), held(tmp_path):
        raise RuntimeError
    check_free(tmp_path)


def test_a_process_that_was_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    with held(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(600)
    try:
        check_free(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_full_disk_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with held(tmp_path), pytest.raises(BadInput, match="is being trained by another process"):
        check_free(tmp_path)


def test_without_locks_a_file_beats(tmp_path: Path, without_locks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    with held(tmp_path):
        no_beats_for(tmp_path, 3600)
        deadline_s = time.monotonic() + 20
        while time.time() - (tmp_path / ".lock.beat").stat().st_mtime > 60:
            assert time.monotonic() < deadline_s, "it never beat"
            time.sleep(0.01)
        monkeypatch.setattr(run_lock, "BEAT_S", 5.0)
        with pytest.raises(BadInput, match=f"process {os.getpid()} on host"):
            check_free(tmp_path)
    assert ".lock.beat" not in names(tmp_path)


def gone(directory: Path) -> Holder:
    """Of this host, and dead."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return Holder(process=process.pid)


def elsewhere(directory: Path) -> Holder:
    return Holder(host="elsewhere")


@pytest.mark.parametrize(
    ("holder", "silent_s", "blocks"),
    [(gone, 0.0, False), (elsewhere, 5.0, True), (elsewhere, 16.0, False)],
)
def test_who_beats_no_more_blocks_no_more(
    tmp_path: Path, without_locks: None, holder: Callable[[Path], Holder], silent_s: float, blocks: bool
) -> None:
    (tmp_path / ".lock.beat").write_bytes(run_lock._line(holder(tmp_path)))
    no_beats_for(tmp_path, silent_s)
    if blocks:
        with pytest.raises(BadInput, match="on host elsewhere since"):
            check_free(tmp_path)
    else:
        check_free(tmp_path)
    assert [name for name in names(tmp_path) if name != ".lock"] == ([".lock.beat"] if blocks else [])


def test_of_two_that_take_over_one_is_refused(
    tmp_path: Path, without_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock.beat").write_bytes(run_lock._line(elsewhere(tmp_path)))
    no_beats_for(tmp_path, 60)

    def another_comes(seconds: float) -> None:
        (tmp_path / ".lock.beat").write_bytes(run_lock._line(Holder(host="third")))

    monkeypatch.setattr(time, "sleep", another_comes)
    with pytest.raises(BadInput, match="on host third since"):
        check_free(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="to write in the run directory"):
        check_free(tmp_path / "file" / "run")
