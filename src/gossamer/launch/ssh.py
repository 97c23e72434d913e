"""Start the same command on several hosts over ssh, and supervise it to its end."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from gossamer.launch.interface import route_to
from gossamer.launch.local import to_stderr
from gossamer.launch.preflight import SSH, HostFindings, HostRequirements, look
from gossamer.launch.remote_command import STOP, HostOrder, node_arguments
from gossamer.launch.remote_hosts import RemoteHost, see_through
from gossamer.process import tied
from gossamer.process.json_lines import write_line
from gossamer.spec.errors import BadInput

_SSH_FAILED = 255
_TAIL_BYTES = 2000


def launch_hosts(
    hosts: Sequence[str],
    arguments: Sequence[str],
    *,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    paths: Sequence[str] = (),
    python: str = sys.executable,
    meet: str = "",
    folder: str = "",
    say: Callable[[str], None] = to_stderr,
) -> int:
    """Run `python -m gossamer ARGUMENTS --node-rank I ...` on every host; return exit code 0, 2, 3 or 4.

    hosts: names known to ssh, host 0 first. files: texts by file name, written on every host; "{files}" in `arguments`
    is their folder there. env: variables of the command. paths: files and folders that must exist on every host.
    python: the interpreter there. meet: "ADDRESS:PORT" of host 0, "" to use the address by which ssh reached it.
    folder: working directory there, "" for the path of the current one. say: called with messages for the user. Host
    0's output is passed on. Raises BadInput, with a table, when a host cannot run the command.
    """
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice or not hosts:
        raise BadInput(
            f"wanted every host once, got {', '.join(hosts) or 'none'}: correct the list", key="machines.hosts"
        )
    wanted = HostRequirements(python=python, paths=tuple(paths), folder=folder or str(Path.cwd()))
    found = look(hosts, wanted)
    where = meet or _meeting_place(hosts, found)
    orders = [
        HostOrder(
            argv=(python, "-m", "gossamer", *arguments, *node_arguments(number, len(hosts), where)),
            files=dict(files or {}),
            folder=wanted.folder,
            env=dict(env or {}),
        )
        for number in range(len(hosts))
    ]
    with ExitStack() as stack:
        remotes = [
            _Remote(host, python, order, stack, echo=n == 0)
            for n, (host, order) in enumerate(zip(hosts, orders, strict=True))
        ]
        return see_through(remotes, say)


class _Remote(RemoteHost):
    """One ssh, its order given and its standard input kept open: the host ends when that closes."""

    def __init__(self, host: str, python: str, order: HostOrder, stack: ExitStack, *, echo: bool) -> None:
        self.host = host
        self._kept: IO[bytes] | None = None
        if not echo:
            self._kept = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack is one)
        self._process = subprocess.Popen(
            tied([*SSH, host, shlex.join([python, "-m", "gossamer.launch.remote_agent"])]),
            stdin=subprocess.PIPE,
            stdout=self._kept,
            stderr=self._kept,
            start_new_session=True,  # Ctrl-C reaches the hosts through us alone
        )
        stack.callback(self._end)
        self._tell(write_line(order))

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._tell(STOP + b"\n")

    def hang_up(self) -> None:
        with suppress(BrokenPipeError):
            self._pipe().close()

    def said(self) -> str:
        lost = "the ssh connection was lost\n" if self.poll() == _SSH_FAILED else ""
        if self._kept is None:
            return lost.strip()
        self._kept.seek(max(0, self._kept.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return (lost + self._kept.read().decode("utf-8", "replace")).strip()

    def _tell(self, line: bytes) -> None:
        with suppress(BrokenPipeError, ValueError):  # it has ended already
            self._pipe().write(line)
            self._pipe().flush()

    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _end(self) -> None:
        self.hang_up()
        self._process.kill()
        self._process.wait()


def _meeting_place(hosts: Sequence[str], found: Mapping[str, HostFindings]) -> str:
    """Host 0's address as the other hosts can use it, and a port that was free there a moment ago."""
    first, *others = (_address(host, found[host]) for host in hosts)
    far = [address for address in others if not address.startswith("127.")]
    if first.startswith("127.") and far:  # host 0 is this machine, and the others must not look for it in themselves
        first = route_to(far[0])
    return f"{first}:{found[hosts[0]].port}"


def _address(host: str, found: HostFindings) -> str:
    if found.address and ":" not in found.address:
        return found.address
    name = host.rpartition("@")[2]
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise BadInput(
            f"the address of host {name} is not known here ({error}): give --rdzv-endpoint HOST:PORT"
        ) from None
