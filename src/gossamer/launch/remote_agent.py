"""Run the command of an ssh launch on one host: read the order from standard input, and end with its sender.

`python -m gossamer.launch.remote_agent`. First line: a `HostOrder`; then one line per stop request. The end of input
means that the sender is gone: the command gets SIGTERM to save and stop, again after 60 s to stop at once, and is
killed after 60 s more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydantic import TypeAdapter

from gossamer.launch.remote_command import FILES, STOP, HostOrder
from gossamer.process import BAD_INPUT, FAILED, EventLoop, tied
from gossamer.process.json_lines import JsonLineReader, read_line
from gossamer.spec.errors import WireMismatch

_TURN_S = 0.1
_GRACE_S = 60.0
_ASKS = 2  # times that the command is asked to end
_ORDER: TypeAdapter[HostOrder] = TypeAdapter(HostOrder)


class Sender:
    """A reader of the order and the stop requests that the launching host sends to standard input."""

    def __init__(self) -> None:
        self._lines = JsonLineReader()
        self._inbox: list[bytes] = []
        self.is_gone = False

    def fileno(self) -> int:
        """Return the file descriptor of standard input."""
        return 0

    def read(self) -> None:
        """Read available bytes and queue the complete lines; the end of input sets `is_gone`."""
        data = os.read(0, 1 << 16)
        self._inbox += self._lines.feed(data)
        self.is_gone = not data

    def order(self) -> HostOrder:
        """Wait for the order and return it. Raises WireMismatch when the input ends or the line is invalid."""
        while not self._inbox and not self.is_gone:
            self.read()
        if not self._inbox:
            raise WireMismatch(
                "wanted a start command on standard input, got nothing: start this process with gossamer train --hosts"
            )
        return read_line(self._inbox.pop(0), _ORDER)

    def wishes(self) -> int:
        """Return the number of stop requests received since the last call."""
        inbox, self._inbox = self._inbox, []
        return inbox.count(STOP)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _deaf)  # wishes come by standard input, and its end says that ssh has ended
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # Ray blocks it, and the command would inherit that
    sender = Sender()
    try:
        order = sender.order()
    except WireMismatch as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        for name, text in order.files.items():
            (Path(folder) / Path(name).name).write_text(text, "utf-8")
        command = subprocess.Popen(
            tied([argument.replace(FILES, folder) for argument in order.argv]),
            stdin=subprocess.DEVNULL,
            cwd=order.folder if Path(order.folder).is_dir() else None,
            env={**os.environ, **order.env},
            start_new_session=True,
        )
        return _see_through(command, sender)


def _see_through(command: subprocess.Popen[bytes], sender: Sender) -> int:
    """The command's exit code."""
    loop = EventLoop()
    loop.watch(sender, sender.read)
    asked_s, asked = -1.0, 0
    while command.poll() is None:
        loop.turn(_TURN_S)
        for _ in range(sender.wishes()):
            command.send_signal(signal.SIGINT)
        if sender.is_gone:
            loop.forget(sender)
            if asked_s < 0 or time.monotonic() - asked_s > _GRACE_S:
                if asked < _ASKS:
                    command.send_signal(signal.SIGTERM)
                else:  # it was stopped, or hangs: its ranks end with it
                    os.killpg(command.pid, signal.SIGKILL)
                asked_s, asked = time.monotonic(), asked + 1
            time.sleep(_TURN_S)
    loop.close()
    return command.returncode if command.returncode >= 0 else FAILED


def _deaf(number: int, frame: object) -> None:
    """Unlike SIG_IGN this is not inherited by the command."""


if __name__ == "__main__":
    sys.exit(main())
