"""Folders to run the command in, and one finished run that several tests look at."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from system import warm
from system.command import Done, InThisProcess, Place, eventually


def policed(folder: Path) -> Iterator[Place]:
    place = Place.make(folder)
    yield place
    place.end_all()
    try:
        eventually(lambda: not place.living(), "the end of all processes", within_s=20)
    finally:
        for pid in place.living():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def warm_gossamer() -> Iterator[None]:
    """Commands start as copies of a process that has the imports."""
    with warm.opened():
        yield


@pytest.fixture
def place(tmp_path: Path, warm_gossamer: None) -> Iterator[Place]:
    """A folder with a corpus; no process started in it survives the test."""
    yield from policed(tmp_path / "place")


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> InThisProcess:
    """The command in the tests' own process, for what starts no ranks or is refused."""
    return InThisProcess(monkeypatch, capfd)


@dataclass(frozen=True)
class Trained:
    """A finished run on two processes: 6 steps, saved after 2, 4 and 6."""

    place: Place
    done: Done
    run: Path

    def copy(self, target: Path) -> Path:
        """The run's folder, to be changed."""
        return Path(shutil.copytree(self.run, target))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, warm_gossamer: None) -> Iterator[Trained]:
    """Read only: take a copy to change it."""
    for place in policed(tmp_path_factory.mktemp("trained") / "place"):
        config = place.config(train={"steps": 6}, machines={"processes": 2})
        done = place.run("train", config, "--json", is_fresh=True)
        assert done.code == 0, done.out[-3000:] + done.err[-3000:]
        (run,) = place.runs()
        yield Trained(place, done, run)
