"""Processes on emulated hosts: start them in their namespaces, set their environment, read their output."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from gossamer.netlab.names import DEVICE, MASTER_PORT, MEET_PORT, address
from gossamer.spec.errors import BadInput

HostOutput: TypeAlias = Callable[[int, str], None]  # (host, line without its end)
Exited: TypeAlias = Callable[[int, int], None]  # (host, exit code), in the order in which they end

_LOOK_S = 0.01

# The shell joins the cgroups, then becomes the command inside the host's network: one process id throughout.
_ENTER = 'net=$1; shift; while [ "$1" != -- ]; do echo $$ >"$1" || exit 125; shift; done; shift; '
_ENTER += 'exec nsenter --net="$net" -- "$@"'


def enter(namespace: str, cgroups: Sequence[Path], argv: Sequence[str]) -> list[str]:
    """Return the command line that runs `argv` in a namespace and under cgroups.

    Raises BadInput where there is no such program.
    """
    if not argv:
        raise BadInput("no command: write what every host runs, e.g. -- python train.py", key="command")
    if shutil.which(argv[0]) is None:
        raise BadInput(f"no program is called {argv[0]!r}: check the path and the name", key="command")
    return ["sh", "-c", _ENTER, "lab", namespace, *(str(c / "cgroup.procs") for c in cgroups), "--", *argv]


def rank_environment(host: int, hosts: int, *, threads: int) -> dict[str, str]:
    """Return the environment variables of a rank: the names torchrun uses, and Gossamer's own."""
    return {
        "RANK": str(host),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "NCCL_SOCKET_IFNAME": DEVICE,
        "GOSSAMER_NODE_RANK": str(host),
        "GOSSAMER_NNODES": str(hosts),
        "GOSSAMER_RDZV_ENDPOINT": f"{address(0)}:{MEET_PORT}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


class Pipe:
    """A reader of one host's output, line by line."""

    def __init__(self, host: int, process: subprocess.Popen[bytes], output: HostOutput) -> None:
        assert process.stdout is not None
        self.host, self.process, self.stdout, self._output = host, process, process.stdout, output
        self._rest = b""
        os.set_blocking(self.stdout.fileno(), False)

    def read(self) -> bool:
        """Pass on the lines that are there; return False when there was no data (for now, or at the end)."""
        try:
            data = os.read(self.stdout.fileno(), 65536)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._output(self.host, line.decode(errors="replace"))
        return bool(data)

    def finish(self) -> None:
        """Pass on the rest of the output of a process that has ended.

        A child of it that still runs is not waited for.
        """
        while self.read():
            pass
        if self._rest:
            self._output(self.host, self._rest.decode(errors="replace"))
        self.stdout.close()


def follow(
    processes: Sequence[subprocess.Popen[bytes]],
    *,
    output: HostOutput | None = None,
    exited: Exited | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[int]:
    """Wait for one process per host and return the exit codes in host order.

    Lines of output and exits are passed on as they come. `meanwhile` is called a hundred times a second.
    """
    pipes = {host: Pipe(host, p, output) for host, p in enumerate(processes) if output is not None}
    codes: dict[int, int] = {}
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes.values():
            waiting.register(pipe.stdout, selectors.EVENT_READ, pipe)
        while len(codes) < len(processes):
            quiet = True
            meanwhile()
            for key, _ in waiting.select(_LOOK_S):
                quiet = not key.data.read() and quiet
            for host, code in _ended(processes, codes):
                codes[host] = code
                if host in pipes:
                    waiting.unregister(pipes[host].stdout)
                    pipes[host].finish()
                if exited is not None:
                    exited(host, code)
            if quiet:  # a pipe closed by a process that lives on is always readable
                time.sleep(_LOOK_S)
    return [codes[host] for host in range(len(processes))]


def _ended(processes: Sequence[subprocess.Popen[bytes]], known: Mapping[int, int]) -> list[tuple[int, int]]:
    polled = [(host, process.poll()) for host, process in enumerate(processes) if host not in known]
    return [(host, code) for host, code in polled if code is not None]


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the processes that still run, and reap all of them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
