"""The worker's side of a launch: read the rank, send heartbeats, obey stop signals, report errors."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gossamer.launch.environment import LauncherRank, read_environment
from gossamer.process import BAD_INPUT, DONE, FAILED, INTERRUPTED, PEER_LOST, Heartbeat, write_error
from gossamer.process.stack_request import write_stacks_when_asked
from gossamer.spec.errors import BadInput, Interrupted, PeerLost


class StopFlag:
    """A flag set by SIGTERM (supervisor, scheduler) or SIGINT; read it at step boundaries, where all ranks agree."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """Install the signal handlers, in the main thread only: Python delivers signals to no other thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._asked)

    def ignore(self) -> None:
        """Ignore both signals, when nothing is left to stop.

        Python removes its own handlers before a process has quite ended.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while entered, in a process that uses them itself before and after.

        A second SIGINT raises KeyboardInterrupt at once.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_set = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The context of a worker's main function: rank, heartbeat and stop flag."""

    place: LauncherRank
    heartbeat: Heartbeat
    stop: StopFlag


def run_worker(body: Callable[[Ready], None]) -> int:
    """Run `body` as the worker this process was started as; return the exit code that its supervisor understands.

    0: `body` returned; 2: BadInput; 4: Interrupted (a checkpoint is saved); 75: PeerLost; 3: any other error. The
    worker records the code for the supervisor before its process exits. A failure writes an error report into the run's
    errors folder and, unless it is BadInput or PeerLost, its traceback to stderr. Raises BadInput when there is no
    launcher.
    """
    place = read_environment()
    stop = StopFlag()
    stop.install()
    write_stacks_when_asked()
    heartbeat = Heartbeat(
        place.rank,
        place.supervisor.heartbeat,
        place.supervisor.token,
        period_s=place.supervisor.heartbeat_s,
        generation=place.start.generation,
        box=place.supervisor.box,
    )
    try:
        body(Ready(place=place, heartbeat=heartbeat, stop=stop))
        heartbeat.leave(DONE)
    except Interrupted:
        heartbeat.leave(INTERRUPTED)
    except BaseException as error:
        _leave_note(place, error)
        heartbeat.leave(_code(error), why=f"{type(error).__name__}: {error}")
    finally:
        stop.ignore()
        heartbeat.close()
    return heartbeat.word.code


def _code(error: BaseException) -> int:
    if isinstance(error, BadInput):
        return BAD_INPUT
    return PEER_LOST if isinstance(error, PeerLost) else FAILED


def _leave_note(place: LauncherRank, error: BaseException) -> None:
    with suppress(OSError):  # a full disk, under the log too: the supervisor hears of it all the same
        if isinstance(error, PeerLost):
            said = str(error)
            named = said if said.startswith(f"rank {place.rank} ") else f"rank {place.rank} lost a peer: {said}"
            sys.stderr.write(f"{named}\n")  # its supervisor, if any, has more to say
        elif not isinstance(error, BadInput):
            sys.excepthook(type(error), error, error.__traceback__)
    if place.supervisor.errors:
        try:
            write_error(Path(place.supervisor.errors), place.rank, error)
        except OSError as disk:
            with suppress(OSError):
                sys.stderr.write(f"the report of this error was not written to {place.supervisor.errors}: {disk}\n")
