"""How a worker process comes into being: in an interpreter of its own, or as a copy of one that has all imports.

To import torch and transformers takes a rank seconds of a core and some 300 MB. On a host with several ranks one
template process does it once, and each rank is a copy of it, with pages that they share. The supervisor itself imports
none of it: it stays small.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, final

from gossamer.process._template import ForkRequest
from gossamer.process.template import Template, TemplateLost, can_split, tied

# Of the drivers of NVIDIA (in some containers, on Jetson and under Windows: without the first), and of ROCm.
_DEVICES = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command of one worker. `env` is its whole environment; `echo` copies its output to ours as well as to `log`.

    descriptors: our file descriptors that it inherits. gives_word: its program records its exit (`Heartbeat.leave`),
    and exit code 0 without a record is a failure.
    """

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    echo: bool = False
    descriptors: tuple[int, ...] = ()
    gives_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedProcess:
    """A child of this process, which leads a session of its own. `stdout`, `stderr`: None where they go to the log."""

    pid: int
    stdout: BinaryIO | None
    stderr: BinaryIO | None
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def reaped(self, code: int) -> None:
        """Note that the process was waited for and ended with `code`."""
        if self.popen is not None:
            self.popen.returncode = code


class Starter(ABC):
    """Starts worker processes as children of this process that are killed (on Linux) when it dies."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether `start` starts a worker without waiting for anything."""

    @abstractmethod
    def start(self, job: Command, *, log: BinaryIO, box: int) -> StartedProcess:
        """Start `job`; its output goes to `log` unless it echoes. `box`: the descriptor of its position page."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the starter holds; the workers go on."""


@final
class FreshStarter(Starter):
    """Starts each worker in an interpreter of its own, or as any other program."""

    def is_ready(self) -> bool:
        return True

    def start(self, job: Command, *, log: BinaryIO, box: int) -> StartedProcess:
        process = subprocess.Popen(
            tied(job.argv),
            env={**job.env, "GOSSAMER_BOX": str(box)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if job.echo else log,
            stderr=subprocess.PIPE if job.echo else log,
            bufsize=0,
            start_new_session=True,
            pass_fds=(box, *job.descriptors),
        )
        out, err = process.stdout, process.stderr
        return StartedProcess(pid=process.pid, stdout=out, stderr=err, popen=process)  # type: ignore[arg-type]

    def close(self) -> None:
        pass


@final
class ForkedStarter(Starter):
    """Starts workers as copies of a template process that imports `imports` beside their program.

    `first` is one of the commands; all are `python -m` of one module. Where the template is lost (its imports fail, or
    start threads, say), or is closed before it is ready, workers start in interpreters of their own: the log of `first`
    says why.
    """

    def __init__(self, first: Command, imports: Sequence[str] = ()) -> None:
        self._fresh = FreshStarter()
        first.log.parent.mkdir(parents=True, exist_ok=True)
        with first.log.open("ab") as log:
            self._template: Template | None = Template(
                [first.argv[2], *imports], env=first.env, log=log, shown=first.argv[3:]
            )

    def is_ready(self) -> bool:
        try:
            return self._template is None or self._template.is_ready()
        except TemplateLost:
            self.close()
            return True

    def start(self, job: Command, *, log: BinaryIO, box: int) -> StartedProcess:
        if self._template is not None and self.is_ready():
            try:
                return _copied(self._template, job, log, box)
            except TemplateLost as error:
                log.write(f"this process imports for itself, as {error}\n".encode())
                log.flush()
        self.close()
        return self._fresh.start(job, log=log, box=box)

    def close(self) -> None:
        """End the template process."""
        if self._template is not None:
            self._template.close()
            self._template = None


def starter_of(jobs: Sequence[Command], imports: Sequence[str] = ()) -> Starter:
    """Return the starter for the workers of this host. `imports`: modules that they will import beside their program.

    Workers are copied where there are several of one Python module (or this process is a copy with its imports).
    """
    is_module = bool(jobs) and jobs[0].argv[:2] == (sys.executable, "-m") and len(jobs[0].argv) > 2
    if not (is_module and copies_are_wanted()):
        return FreshStarter()
    is_worth_it = len(jobs) > 1 or can_split([jobs[0].argv[2], *imports])
    return ForkedStarter(jobs[0], imports) if is_worth_it else FreshStarter()


def copies_are_wanted() -> bool:
    """Return whether several workers of one module are copies on this host: they may be, and the user lets them."""
    return may_copy() and os.environ.get("GOSSAMER_FRESH_RANKS") != "1"


def may_copy() -> bool:
    """Return whether processes may be copies here: on Linux with /proc and without an accelerator.

    A process that has met one cannot be forked, and imports of a user's environment may meet it.
    """
    has_device = any(os.path.exists(device) for device in _DEVICES)
    return sys.platform == "linux" and os.path.isdir("/proc/self/task") and not has_device


def _copied(template: Template, job: Command, log: BinaryIO, box: int) -> StartedProcess:
    """Start `job` as a copy of the template. Raises TemplateLost."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        nothing = theirs.enter_context(open(os.devnull, "rb"))
        ends: list[BinaryIO] = []
        outputs = [log.fileno(), log.fileno()]
        for index in range(2 if job.echo else 0):
            read, outputs[index] = os.pipe()
            theirs.callback(os.close, outputs[index])
            ends.append(ours.enter_context(io.FileIO(read, "rb")))  # type: ignore[arg-type]
        request = ForkRequest(
            arguments=job.argv[3:],
            env={**job.env, "GOSSAMER_BOX": str(box)},
            folder=os.getcwd(),
            descriptors=(0, 1, 2, box, *job.descriptors),
        )
        pid = template.fork(request, [nothing.fileno(), *outputs, box, *job.descriptors])
        ours.pop_all()
    return StartedProcess(pid=pid, stdout=ends[0] if ends else None, stderr=ends[1] if ends else None)
