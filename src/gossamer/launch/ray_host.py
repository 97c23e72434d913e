"""One host of a run on Ray: an actor that runs `gossamer train` as its child, as ssh would.

An actor holds one bundle of the run's placement group. Its child is `gossamer.launch.remote_agent`, whose standard
input ends with the actor: a run whose actor was killed or preempted saves and ends by itself.
"""

from __future__ import annotations

import os
import platform
import select
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from gossamer.launch.remote_command import STOP, HostOrder
from gossamer.process import tied
from gossamer.process.json_lines import Said, write_line

_BLOCK_BYTES = 1 << 16


class RayPlace(Said):
    """Where an actor is. `port`: free there a moment ago; `versions`: of the packages that must be equal."""

    hostname: str
    port: int
    versions: dict[str, str]


class RayHost:
    """The actor. Its methods return at once, `turn` after `within_s`: calls are served one after the other."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None

    def place(self) -> bytes:
        """Return where this actor is, and with which versions, as the line of a `RayPlace`."""
        with socket.socket() as one:
            one.bind(("", 0))
            port = int(one.getsockname()[1])
        found = {"python": platform.python_version()}
        for package in ("gossamer", "torch"):
            with suppress(PackageNotFoundError):
                found[package] = version(package)
        return write_line(RayPlace(hostname=socket.gethostname(), port=port, versions=found))

    def start(self, arguments: list[str], files: dict[str, str], folder: str, env: dict[str, str]) -> None:
        """Start `python -m gossamer ARGUMENTS` in `folder`; `files` by name, in the folder that "{files}" names."""
        argv = (sys.executable, "-m", "gossamer", *arguments)
        order = HostOrder(argv=argv, files=files, folder=folder, env=env)
        self._agent = subprocess.Popen(
            tied([sys.executable, "-m", "gossamer.launch.remote_agent"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._tell(write_line(order))

    def turn(self, within_s: float) -> tuple[int | None, bytes]:
        """Return the exit code of the command, None while it runs, and what it wrote since the last call."""
        agent = self._agent
        assert agent is not None and agent.stdout is not None, "start comes first"
        code, wrote = agent.poll(), b""
        wait_s = within_s if code is None else 0.0
        while select.select([agent.stdout], [], [], wait_s)[0]:
            block = os.read(agent.stdout.fileno(), _BLOCK_BYTES)
            wrote, wait_s = wrote + block, 0.0
            if not block:
                break
        return code, wrote

    def stop(self) -> None:
        """Ask the command to save and stop, the second time to stop at once."""
        self._tell(STOP + b"\n")

    def hang_up(self) -> None:
        """End the child's standard input: it saves and ends."""
        if self._agent is not None and self._agent.stdin is not None:
            with suppress(BrokenPipeError):
                self._agent.stdin.close()

    def _tell(self, line: bytes) -> None:
        assert self._agent is not None and self._agent.stdin is not None, "start comes first"
        with suppress(BrokenPipeError, ValueError):  # it has ended already
            self._agent.stdin.write(line)
            self._agent.stdin.flush()
