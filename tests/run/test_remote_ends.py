"""A command that does not end on one host: asked twice, then killed there, and left alone by who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from gossamer.launch import remote_agent, remote_hosts
from gossamer.launch.remote_hosts import RemoteHost, see_through
from gossamer.process import DONE, FAILED, tied
from gossamer.process.orphan_reaper import OrphanReaper


@dataclass
class Host(RemoteHost):
    """A host whose command has ended with this code; None: it does not end, or with `then` once it is hung up."""

    host: str
    code: int | None
    then: int | None = None
    asked: list[str] = field(default_factory=list)

    def poll(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.asked.append("stop")

    def hang_up(self) -> None:
        self.asked.append("hang up")
        self.code = self.then if self.code is None else self.code

    def said(self) -> str:
        return f"last words of {self.host}"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE_S", "_SAVE_S", "_GIVE_UP_S"):
        monkeypatch.setattr(remote_hosts, name, 0.2)


@pytest.mark.parametrize("code", [FAILED, DONE])
def test_a_host_that_never_ends_is_left_alone_and_named(code: int) -> None:
    """Also where the others have ended well."""
    hosts, said = [Host("a", code), Host("b", None)], list[str]()
    assert see_through(hosts, said.append) == FAILED
    assert hosts[1].asked == ["hang up"]
    assert said[0] == "host b: it has not ended 0.2 s after it was told to: end the command there"


def test_a_host_that_ends_when_told_to_is_waited_for() -> None:
    hosts, said = [Host("a", DONE), Host("b", None, then=DONE)], list[str]()
    assert see_through(hosts, said.append) == DONE
    assert hosts[1].asked == ["hang up"] and said == []


def test_a_command_that_was_stopped_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM stays with a stopped process until it goes on."""
    monkeypatch.setattr(remote_agent, "_GRACE_S", 0.2)
    command = subprocess.Popen(tied([sys.executable, "-c", "import time; time.sleep(600)"]), start_new_session=True)
    command.send_signal(signal.SIGSTOP)
    os.waitpid(command.pid, os.WUNTRACED)  # else SIGTERM may be first
    gone, other_end = os.pipe()
    os.close(other_end)

    class Gone:
        is_gone = True

        def fileno(self) -> int:
            return gone

        def read(self) -> None:
            os.read(gone, 1)

        def wishes(self) -> int:
            return 0

    sender: Any = Gone()
    try:
        assert remote_agent._see_through(command, sender) == FAILED
        assert command.returncode == -signal.SIGKILL
    finally:
        os.close(gone)
        command.kill()
        command.wait()


def test_a_reaper_that_was_stopped_does_not_hold_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.process.orphan_reaper._END_S", 0.2)
    reaper = OrphanReaper()
    reaper._process.send_signal(signal.SIGSTOP)
    os.waitpid(reaper._process.pid, os.WUNTRACED)
    reaper.close()
    assert reaper._process.returncode == -signal.SIGKILL
