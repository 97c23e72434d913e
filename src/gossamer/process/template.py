"""The supervisor's side of a template process (`_template.py`): have it import, then ask it for copies of itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, final

from gossamer.process import _template
from gossamer.process._shown import ROOM, ROOM_VARIABLE
from gossamer.process._template import READY, ForkRequest

_ENTER = Path(__file__).with_name("_child_init.py")
_PROGRAM = "gossamer.process._template_main"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_ADOPTS = threading.Lock()  # it is of the process: one fork at a time sets it and puts it back
_ANSWER_S = 60.0  # a fork takes milliseconds; on a machine that swaps, seconds


class TemplateLost(OSError):
    """The template process has ended, or could not import what it was to import."""


@final
class Template:
    """A template process that imports `modules` and is forked for each copy; the first one is the copies' program.

    It is a fresh interpreter with the environment `env`, as libraries read theirs when they are loaded; or a fork of
    this process where that is such a copy itself (`can_split`). What it says goes to `log`. `shown`: arguments of the
    copies, which its command line has for those who look at it. On Linux only.
    """

    def __init__(
        self, modules: Sequence[str], *, env: Mapping[str, str], log: BinaryIO, shown: Sequence[str] = ()
    ) -> None:
        self._is_ready, self._process = False, None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if can_split(modules):
                self._pid = _split(theirs, modules)
            else:
                program = (sys.executable, "-m", _PROGRAM, str(theirs.fileno()), str(os.getpid()))
                self._process = subprocess.Popen(
                    tied((*program, *modules, "--", *shown, " " * ROOM)),
                    env={**env, ROOM_VARIABLE: " " * ROOM},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
                self._pid = self._process.pid
        self._channel.setblocking(False)

    def is_ready(self) -> bool:
        """Return whether it has imported its modules. Raises TemplateLost when it has ended instead, or was stopped."""
        if not self._is_ready:
            with contextlib.suppress(BlockingIOError):
                self._is_ready = self._heard() == READY
        with contextlib.suppress(ChildProcessError):  # it has ended, and is heard to have
            if os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                raise TemplateLost(f"the template process {self._pid} was stopped by a signal")
        return self._is_ready

    def fork(self, request: ForkRequest, descriptors: Sequence[int]) -> int:
        """Start a copy and return its pid: a child of this process, in a session of its own, that dies with it.

        descriptors: ours, which the copy has under the numbers of `request.descriptors`. Call it when `is_ready`.
        Raises TemplateLost.
        """
        self._channel.settimeout(_ANSWER_S)
        try:
            with _unnamed_file(request.encoded()) as page, _adopting():
                socket.send_fds(self._channel, [b"fork"], [page.fileno(), *descriptors])
                return int(self._heard())
        except (OSError, ValueError) as error:
            raise TemplateLost(f"the template process {self._pid} did not start a copy: {error}") from None

    def close(self) -> None:
        """End the template process; its copies go on."""
        self._channel.close()
        os.kill(self._pid, signal.SIGKILL)  # it may still import; it has nothing to lose
        _, status = os.waitpid(self._pid, 0)
        if self._process is not None:
            self._process.returncode = os.waitstatus_to_exitcode(status)

    def _heard(self) -> bytes:
        try:
            said = self._channel.recv(64)
        except ConnectionError:
            said = b""
        if not said:
            raise TemplateLost(f"the template process {self._pid} has ended")
        return said


def can_split(modules: Sequence[str]) -> bool:
    """Return whether a fork of this process can be the template: it has the imports, and is a copy of a template.

    Any other process may hold what its copies must not have: settings of torch, exit handlers, unwritten output.
    """
    is_copy = sys.orig_argv[1:3] == ["-m", _PROGRAM] and all(module in sys.modules for module in modules)
    return is_copy and threading.active_count() == 1 == len(os.listdir("/proc/self/task"))


def tied(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` as a child that is killed (on Linux) when this process dies."""
    return [sys.executable, "-I", "-S", str(_ENTER), str(os.getpid()), *argv]


def _split(channel: socket.socket, modules: Sequence[str]) -> int:
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _template.split(channel, supervisor, modules)
    finally:
        os._exit(1)


def _unnamed_file(data: bytes) -> BinaryIO:
    """Return an open file in memory that holds `data`. (Builds of Python for old systems have no os.memfd_create.)"""
    file: BinaryIO = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115  (closed by whoever asked)
    file.write(data)
    file.flush()
    return file


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """While entered, grandchildren whose parent ends become children of this process."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    with _ADOPTS:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError("this system gives no process the grandchildren whose parent ended")
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
