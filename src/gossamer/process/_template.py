"""A process that has imported a program once and forks itself into each copy of it that is asked for.

Run as `python -m gossamer.process._template_main DESCRIPTOR SUPERVISOR MODULE... -- ...`: a socket to the supervisor
that started it, that supervisor's pid, and the modules to import; the first one is the program. What follows is for
those who look at its command line. It computes nothing, and serves only where its imports left no thread and no open
descriptor, so that what is forked from it is as good as a fresh interpreter. `template.py` has the other side.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from gossamer.process._shown import show

READY = b"ready"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_MOST_DESCRIPTORS = 64
_OWN_STDIO = 3
_ADOPTED_S = 30.0  # milliseconds, but on a machine that swaps
_THREADS_END_S = 0.5  # for the system to forget threads that have ended


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What one copy gets: the program's arguments, its whole environment, its folder and its descriptors.

    descriptors: the numbers under which the copy has the descriptors that came with the request, in their order.
    """

    arguments: tuple[str, ...]
    env: Mapping[str, str]
    folder: str
    descriptors: tuple[int, ...]

    def encoded(self) -> bytes:
        """Return the request as JSON."""
        fields = {
            "arguments": self.arguments,
            "env": dict(self.env),
            "folder": self.folder,
            "descriptors": self.descriptors,
        }
        return json.dumps(fields).encode("utf-8", "surrogateescape")

    @staticmethod
    def decoded(data: bytes) -> ForkRequest:
        """Return the request of `encoded`. It comes from the supervisor, over a socket that nobody else has."""
        fields = json.loads(data.decode("utf-8", "surrogateescape"))
        return ForkRequest(
            arguments=tuple(fields["arguments"]),
            env=fields["env"],
            folder=fields["folder"],
            descriptors=tuple(fields["descriptors"]),
        )


def main() -> None:
    """Import the modules named on the command line, then serve."""
    descriptor, supervisor, *words = sys.argv[1:]
    modules = words[: words.index("--")]
    serve(socket.socket(fileno=int(descriptor)), int(supervisor), modules)


def split(channel: socket.socket, supervisor: int, modules: Sequence[str]) -> NoReturn:
    """Go on as the template, in a fork of a supervisor that has imported `modules` itself."""
    os.setsid()
    kept = _duplicate(channel.fileno(), _OWN_STDIO)
    _take_descriptors([os.open(os.devnull, os.O_RDONLY), 1, 2, kept], [0, 1, 2, kept])
    _tie_to(supervisor)
    serve(socket.socket(fileno=kept), supervisor, modules)


def serve(channel: socket.socket, supervisor: int, modules: Sequence[str]) -> NoReturn:
    """Import `modules`, say that this is done, and fork for each request until `channel` closes."""
    ignored = {number for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its supervisor, not before
    start_folder = os.getcwd()
    for module in modules:
        importlib.import_module(module)
    if why := _why_not_forked(channel.fileno()):
        sys.stderr.write(f"each process imports for itself, as {why}\n")
        sys.stderr.flush()
        os._exit(0)
    gc.collect()
    gc.freeze()  # the copies share these pages: nothing is to write into them
    channel.send(READY)
    while True:
        size, descriptors, _, _ = socket.recv_fds(channel, 64, _MOST_DESCRIPTORS)
        if not size:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            # The copy's parent is this middle process, which ends at once: so the copy becomes a child of the
            # supervisor (PR_SET_CHILD_SUBREAPER), which waits for it and is told of its end as of any child.
            if os.fork():
                os._exit(0)
            _become(channel, supervisor, modules[0], descriptors, start_folder, ignored)
        os.waitpid(middle, 0)
        for one in descriptors:
            os.close(one)


def _why_not_forked(channel: int) -> str:
    """Return what imports left that a fork lacks (threads) or shares with all others (descriptors), "" for nothing."""
    if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        return f"imports left threads: {', '.join(others)}"
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    # Threads that a library ends before each fork, as OpenBLAS does, are gone by now.
    deadline_s = time.monotonic() + _THREADS_END_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if threads > 1:
        return f"imports left native threads: {threads - 1}"
    left = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if int(name) not in (0, 1, 2, channel) and os.path.lexists(f"/proc/self/fd/{name}")
    ]
    return f"imports left open: {', '.join(left)}" if left else ""


def _become(
    channel: socket.socket,
    supervisor: int,
    module: str,
    descriptors: Sequence[int],
    start_folder: str,
    ignored: Set[int],
) -> NoReturn:
    """Go on as the program `module` with what was asked for; never return into what this process was."""
    code = 1
    try:
        _adopted_by(supervisor)
        request = ForkRequest.decoded(_read_all(descriptors[0]))
        os.setsid()
        _reset_signals(ignored)
        channel.send(str(os.getpid()).encode())
        _take_descriptors(descriptors[1:], request.descriptors)
        _as_fresh(request, module, start_folder)
        code = _run(module)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _adopted_by(supervisor: int) -> None:
    """Wait until this process is a child of `supervisor`, and die with it."""
    deadline_s = time.monotonic() + _ADOPTED_S
    while os.getppid() != supervisor:
        if not os.path.exists(f"/proc/{supervisor}") or time.monotonic() > deadline_s:
            os._exit(76)
        time.sleep(0.0002)
    _tie_to(supervisor)


def _tie_to(supervisor: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != supervisor:  # it died before we asked to be told
        os._exit(76)


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


def _take_descriptors(have: Sequence[int], wanted: Sequence[int]) -> None:
    """Put the descriptors that came where they are wanted, and close all others."""
    beyond = max([*wanted, *have, _OWN_STDIO]) + 1
    apart = [_duplicate(one, beyond) for one in have]  # none of them is in the way of another
    for one, number in zip(apart, wanted, strict=True):
        os.dup2(one, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with suppress(OSError):
                os.close(int(name))


def _duplicate(descriptor: int, least: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, least)


def _reset_signals(ignored: Set[int]) -> None:
    """Handle signals as a fresh interpreter does; those that were ignored when the template started stay so."""
    signal.set_wakeup_fd(-1)
    for number in signal.Signals:
        with suppress(OSError, ValueError, TypeError):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _as_fresh(request: ForkRequest, module: str, start_folder: str) -> None:
    """Set what a fresh interpreter takes from its command line, its environment and the system's random source."""
    os.environ.clear()
    os.environ.update(request.env)
    if request.folder != start_folder:
        os.chdir(request.folder)
    sys.path[:] = [request.folder if entry == start_folder else entry for entry in sys.path]
    sys.argv = [module, *request.arguments]
    if "numpy.random" in sys.modules:  # `random` draws anew by itself
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(request.env.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    faulthandler.disable()
    if request.env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    show((sys.executable, "-m", module, *request.arguments), request.env)
    name = f"rank {request.env['RANK']}" if "RANK" in request.env else module
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _run(module: str) -> int:
    """Run `module` as `python -m` does and return its exit code, after what an interpreter does at its end."""
    sys.modules.pop(module, None)
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1
