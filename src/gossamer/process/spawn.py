"""One worker process: own session, bound to its supervisor's life, output logged, reaped with its children."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL, Signals
from typing import BinaryIO

from gossamer.process.event_loop import EventLoop
from gossamer.process.exit_codes import SPOKEN
from gossamer.process.last_position import LastWord, Position, PositionPage
from gossamer.process.orphan_reaper import OrphanReaper
from gossamer.process.starter import Command, Starter
from gossamer.process.tee import Tee, last_line


class Worker:
    """A worker process, started by the constructor.

    Start it from a thread that lives as long as the supervisor: on Linux the worker is killed with the thread that
    started it.
    """

    def __init__(self, job: Command, *, starter: Starter, loop: EventLoop, warden: OrphanReaper) -> None:
        self.rank, self.log, self._warden = job.rank, job.log, warden
        self.exit_code: int | None = None
        self.peak_bytes = 0  # largest resident memory, known once it has exited
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = job.log.open("ab")
        self._log_start_bytes = self._file.tell()
        self._box = PositionPage()
        self._position, self._word, self._gives_word = Position(), LastWord(), job.gives_word
        self._process = starter.start(job, log=self._file, box=self._box.descriptor)
        self.pid = self._process.pid
        warden.guard(self.pid)
        self._tees = [
            Tee(loop, pipe, log=self._file, onward=onward)
            for pipe, onward in ((self._process.stdout, 1), (self._process.stderr, 2))
            if pipe is not None
        ]

    @property
    def runs(self) -> bool:
        """Whether the end of the worker has not been seen yet."""
        return self.exit_code is None

    def poll(self) -> int | None:
        """Return the exit code (minus the signal's number) once the worker has ended, else None.

        When the worker has ended, the rest of its process group is killed.
        """
        if self.runs and self._has_ended():
            self._signal_group(SIGKILL)  # while the dead leader still holds the group's number
            _, status, usage = os.wait4(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
            self._process.reaped(self.exit_code)
            self.peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            self._warden.forget(self.pid)
            for tee in self._tees:
                tee.close()
            self._file.close()
            self._position, self._word = self._box.read(), self._box.word()
            self._box.close()
        return self.exit_code

    def last_position(self) -> Position:
        """Return the worker's current position, or its last one if it has ended."""
        return self._box.read() if self.runs else self._position

    @property
    def word(self) -> LastWord:
        """The exit that the worker has recorded."""
        return self._box.word() if self.runs else self._word

    @property
    def is_at_end(self) -> bool:
        """Whether the worker has recorded the exit with which its program ends."""
        return self._gives_word and self.word.code >= 0

    @property
    def is_silent(self) -> bool:
        """Whether the worker exited with one of the codes that it must record (`SPOKEN`), without recording it."""
        return self._gives_word and self.exit_code in SPOKEN and self._word.code != self.exit_code

    def signal(self, number: Signals) -> None:
        """Send a signal to the worker process alone, not to its children."""
        if self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the worker's process group; stopped processes die too."""
        if self.runs:
            self._signal_group(SIGKILL)

    def state(self) -> str:
        """Return the process state as one letter of ps: R, S, D, T (stopped), Z, ...; "" when it is unknown."""
        return process_state(self.pid) if self.runs else ""

    @property
    def log_bytes(self) -> int:
        """Length of the worker's log, 0 once it has ended."""
        return os.fstat(self._file.fileno()).st_size if self.runs else 0

    def last_line(self) -> str:
        """Return the last line the worker wrote to its log since it was started."""
        return last_line(self.log, since_bytes=self._log_start_bytes)

    def _has_ended(self) -> bool:
        if sys.platform == "linux":
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return process_state(self.pid) in ("Z", "")

    def _signal_group(self, number: Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def process_state(pid: int) -> str:
    """Return the state of process `pid` as one letter of ps, "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        pass
    if sys.platform == "linux":
        return ""
    shown = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()[:1]
