"""The worker's side of the heartbeat: send the rank's position five times per period; end with the supervisor."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from typing import Annotated, Literal

from pydantic import Field

from gossamer.process.exit_codes import ORPHANED
from gossamer.process.json_lines import Said, as_unicode, write_line
from gossamer.process.last_position import LastWord, Position, open_box, write_position, write_word
from gossamer.process.stack_position import stand
from gossamer.spec.errors import RunFailed

BEATS_PER_PERIOD = 5
_CONNECT_S = 10.0
Short = Annotated[str, Field(max_length=200)]


class HeartbeatHello(Said):
    """The first message on a heartbeat connection, which identifies the rank."""

    kind: Literal["hello"] = "hello"
    token: Short
    rank: int
    pid: int
    generation: int


class Beat(Said):
    """A heartbeat message: the position of a rank.

    `sequence` counts operations in an order all ranks share; -1: unknown.
    """

    kind: Literal["beat"] = "beat"
    rank: int
    step: int
    phase: Short
    op: Short
    sequence: int
    progress_age_s: float
    first_step: int  # the first step of this process
    longest_s: float  # the longest pause since then that ended in progress
    waits: bool  # it can do nothing until another rank does something
    place: Short  # the last line of the user's code that it is in


class Goodbye(Said):
    """The message that a worker is about to end by itself: its silence is no failure."""

    kind: Literal["bye"] = "bye"
    rank: int


class Heartbeat:
    """The heartbeat of a rank, sent by its own thread until `close`; without `address` it only keeps what `at` records.

    address: "host:port" of the supervisor; period_s: a rank silent for so many seconds is reported, five heartbeats go
    out in that time; box: descriptor of the supervisor's `PositionPage`, -1 for none.

    When the supervisor closes the connection the process ends at once: SIGKILL to its process group where it leads one,
    else exit code ORPHANED. Raises RunFailed when the supervisor cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        address: str = "",
        token: str = "",
        *,
        period_s: float = 5.0,
        generation: int = 0,
        box: int = -1,
    ) -> None:
        self.rank = rank
        self._beat_s = period_s / BEATS_PER_PERIOD
        self._position, self._moved_s = Position(), time.monotonic()
        self._first_step, self._longest_s = -1, 0.0
        self._moving = threading.Lock()
        self._box = open_box(box) if box >= 0 else None
        self.word = LastWord()
        self._thread: threading.Thread | None = None
        if address:
            self._socket = _connect(address)
            greeting = HeartbeatHello(token=token, rank=rank, pid=os.getpid(), generation=generation)
            self._socket.sendall(write_line(greeting) + self._line())
            self._wake, self._woken = socket.socketpair()
            self._thread = threading.Thread(target=self._run, name="gossamer-heartbeat", daemon=True)
            self._thread.start()

    def at(
        self, *, step: int | None = None, phase: str | None = None, op: str | None = None, sequence: int | None = None
    ) -> None:
        """Record progress: omitted arguments keep their value. Takes some microseconds; any thread may call it."""
        with self._moving:  # else one thread overwrites what another has just recorded
            was, now_s = self._position, time.monotonic()
            self._position = Position(
                was.step if step is None else step,
                was.phase if phase is None else phase,
                was.op if op is None else op,
                was.sequence if sequence is None else sequence,
            )
            if self._first_step < 0:
                self._first_step = self._position.step
            elif was.step > self._first_step:
                self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._moved_s = now_s
            if self._box is not None:
                write_position(self._box, self._position)

    def leave(self, code: int, *, for_all: bool = False, why: str = "") -> None:
        """Record the exit code with which this process is about to end: without a record, 0 counts as a failure.

        The first record counts: an error after everything is saved changes nothing. See `LastWord` for `for_all` and
        `why`.
        """
        if self.word.code >= 0:
            return
        self.word = LastWord(code, for_all, why)
        if self._box is not None:
            write_word(self._box, self.word)

    @property
    def now(self) -> Beat:
        """The heartbeat message for the current position."""
        position, stands = self._position, stand()
        return Beat(
            rank=self.rank,
            step=position.step,
            phase=as_unicode(position.phase)[:200],
            op=as_unicode(position.op)[:200],
            sequence=position.sequence,
            progress_age_s=time.monotonic() - self._moved_s,
            first_step=self._first_step,
            longest_s=self._longest_s,
            waits=stands.waits,
            place=as_unicode(stands.place)[-200:],
        )

    def close(self) -> None:
        """Send `Goodbye` and join the thread. A second call is no error."""
        if self._thread is not None:
            self._wake.close()
            self._thread.join()
            self._woken.close()
            self._socket.close()
            self._thread = None
        with self._moving:
            if self._box is not None:
                self._box.close()
                self._box = None

    def _run(self) -> None:
        unsent = b""
        while True:
            unsent = self._send(unsent or self._line())
            ready, _, _ = select.select([self._socket, self._woken], [], [], self._beat_s)
            if self._woken in ready:
                self._send(unsent + write_line(Goodbye(rank=self.rank)))
                return
            if self._socket in ready:
                self._listen()

    def _send(self, data: bytes) -> bytes:
        """Send what the connection takes now; the rest comes back (a stopped supervisor must not stop us)."""
        try:
            return data[self._socket.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            _end_with_supervisor()
            raise

    def _listen(self) -> None:
        try:
            if self._socket.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        _end_with_supervisor()

    def _line(self) -> bytes:
        return write_line(self.now)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    except OSError as error:
        do = "check that the supervisor process still runs"
        raise RunFailed(f"this worker cannot connect to its supervisor at {address}: {error}: {do}") from None
    connection.setblocking(False)
    return connection


def _end_with_supervisor() -> None:
    if os.getpgrp() == os.getpid():  # started by our supervisor: the group is ours
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(ORPHANED)
