"""A companion process of a rank, in a fresh interpreter, and the connection to it.

It ends with its rank: the system kills it when the thread that started it is gone, and it reads the end of the
connection. What it computes with is in memory that both share; messages say when, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter

from gossamer.process.exit_codes import exit_text
from gossamer.process.json_channel import JsonChannel
from gossamer.process.json_lines import Said
from gossamer.process.template import tied
from gossamer.spec.errors import BadInput, RunFailed

T = TypeVar("T")
_LOOK_S = 1.0  # between two looks at whether the companion still lives
# Ctrl-C in a terminal reaches all its processes, but is meant for the rank, which still finishes its step. What is
# ignored stays ignored in the program that is executed, also while that is starting.
_IGNORING = ("/bin/sh", "-c", 'trap "" INT TERM; exec "$@"', "sh")
_ENV = ("GOSSAMER_BOX",)  # of the rank alone


class Failed(Said):
    """A companion's last message: its error. `is_input`: an error in the user's input, under `key`."""

    kind: Literal["failed"] = "failed"
    why: str
    is_input: bool = False
    key: str = ""

    @staticmethod
    def of(error: BaseException) -> Failed:
        """Return the message of an error."""
        if isinstance(error, BadInput):
            return Failed(why=error.message, is_input=True, key=error.key)
        return Failed(why=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class CompanionLink(Generic[T]):
    """A running companion and the connection to it. `name`: such as "the companion process of this rank".

    `timeout_s`: without a message that is due, after which it has failed; `longer`: what may take so long; `other`: the
    way without this process, for errors.
    """

    process: subprocess.Popen[bytes]
    channel: JsonChannel[T | Failed]
    timeout_s: float
    name: str
    longer: str
    other: str

    @staticmethod
    def to_new(
        module: str,
        kind: TypeAdapter[Any],
        *,
        descriptors: Sequence[int],
        timeout_s: float,
        name: str,
        longer: str,
        other: str,
    ) -> CompanionLink[T]:
        """Run `module` in a fresh interpreter: this process has threads, of which a fork would copy the locks.

        Its argument is the descriptor of its end of the connection. It inherits `descriptors`.
        """
        ours, theirs = socket.socketpair()
        env = {one: value for one, value in os.environ.items() if one not in _ENV}
        with theirs:
            process = subprocess.Popen(
                [*_IGNORING, *tied([sys.executable, "-m", module, str(theirs.fileno())])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(), *descriptors),
            )
        return CompanionLink(process, JsonChannel(ours, kind), timeout_s, name, longer, other)

    def send(self, message: Said, work: str) -> None:
        """Send a message. Raises RunFailed where the companion has ended before `work` was done."""
        try:
            self.channel.send(message)
        except OSError:
            raise self.ended(work) from None

    def wait(self, work: str, is_due: Callable[[], bool]) -> T:
        """Return the next message. Raises RunFailed where the companion has ended or is silent, BadInput for its.

        `is_due` is asked about once a second: whether the companion has something to do, so that its silence counts.
        """
        silent_s, looked = 0.0, time.monotonic()
        while not self.channel.has_line and not select.select([self.channel.connection], [], [], _LOOK_S)[0]:
            now = time.monotonic()
            passed_s = min(now - looked, 2 * _LOOK_S)  # while this process is stopped (Ctrl-Z), so is its companion
            silent_s, looked = silent_s + passed_s if is_due() else 0.0, now
            if silent_s > self.timeout_s:
                self.process.kill()
                raise RunFailed(
                    f"{self.name} (process {self.process.pid}), on which {work} waits, said nothing for "
                    f"{self.timeout_s:g} s and was ended: raise machines.timeout_s if {self.longer} takes so long, or "
                    f"{self.other}"
                )
        said = self.channel.receive()
        if said is None:
            raise self.ended(work)
        if isinstance(said, Failed):
            if said.is_input:
                raise BadInput(said.why, key=said.key)
            raise RunFailed(f"{self.name} failed, on which {work} waits: {said.why}; or {self.other}")
        return said

    def ended(self, work: str) -> RunFailed:
        """Return the error of a companion that has ended before `work` was done."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        code = self.process.poll()
        return RunFailed(
            f"{self.name} (process {self.process.pid}) ended with "
            f"{'no exit code yet' if code is None else exit_text(code)} before {work} was there: SIGKILL often means "
            f"that memory ran out; its output is that of the rank. Resume the run, or {self.other}"
        )

    def close(self) -> None:
        """End the companion."""
        self.channel.connection.close()
        self.process.kill()
        self.process.wait()


def serve_rank(kind: TypeAdapter[T], serve: Callable[[JsonChannel[T]], None]) -> int:
    """Serve the rank at the other end of the connection in the first argument; return the exit code.

    An error of `serve` is told to the rank.
    """
    channel = JsonChannel(socket.socket(fileno=int(sys.argv[1])), kind)
    try:
        serve(channel)
    except (BrokenPipeError, ConnectionResetError):  # the rank is gone, and so is what this was for
        return 0
    except Exception as error:
        if not isinstance(error, BadInput):
            traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send(Failed.of(error))
        return 1
    return 0
