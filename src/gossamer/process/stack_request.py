"""Ask a process that does not go on for the stacks of its threads, and write them into its log when asked.

First that of the main thread alone: other threads may still run, and to write a stack that changes can end the process.
Then all of them, but later: with two signals pending at once the system wakes two threads. Another one takes the first
and writes its own stack, and the main thread takes the second meanwhile and writes none: one thread writes at a time.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from dataclasses import dataclass, field

from gossamer.process.spawn import Worker

STACKS_S = 2.0  # for a process to write its stacks
_MAIN_STACK_S = 0.5 * STACKS_S  # of it, to begin with that of its main thread


def write_stacks_when_asked() -> None:
    """Let this process write its stacks to stderr when a `StackRequest` asks for them; not on Windows."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        faulthandler.register(signal.SIGUSR2, all_threads=True)


@dataclass(slots=True)
class StackRequest:
    """The request for the stacks of one worker, sent by the constructor; call `go_on` again and again."""

    worker: Worker
    _asked_s: float = field(init=False)
    _from_bytes: int = field(init=False)  # length of its log before
    _seen_bytes: int = field(init=False)  # and at the last look
    _asks_for_all: bool = False

    def __post_init__(self) -> None:
        self._asked_s = time.monotonic()
        self._from_bytes = self._seen_bytes = self.worker.log_bytes
        self.worker.signal(signal.SIGUSR1)

    @property
    def is_over(self) -> bool:
        """Whether the process had its time."""
        return time.monotonic() - self._asked_s > STACKS_S

    def go_on(self) -> None:
        """Ask for all stacks once the main thread's is written, or will not be.

        It will not be where the main thread waits for a disk or a device; another thread takes both signals then.
        """
        if self._asks_for_all:
            return
        log_bytes = self.worker.log_bytes
        is_written = self._from_bytes < log_bytes == self._seen_bytes
        if is_written or time.monotonic() - self._asked_s > _MAIN_STACK_S:
            self._asks_for_all = True
            self.worker.signal(signal.SIGUSR2)
        self._seen_bytes = log_bytes
