"""Take turns by the step: several programs train at once, and each runs a few steps while all others wait.

A machine that slows down for a minute slows all of them alike, and a program starts once for all of its turns. In the
folder that programs share, the pipe `NAME.HOST.go` brings a host of a program the round of its next turn, and
`NAME.HOST` has the round that it has ended (-1: it is at its first step). A host that waits reads its pipe, which takes
nothing of a processor.

    python -m links.turns FOLDER NAME STEPS train run.yaml     # `gossamer train`, which waits before its steps
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_LOOK_S, _PATIENCE_S = 0.02, 60.0  # of who gives a turn, for a host that has just said that it waits
HOST = "LINKS_HOST"


@dataclass(slots=True)
class Turns:
    """The turns of one host of the program `name`, of `steps` steps each."""

    folder: Path
    name: str
    steps: int
    host: str
    made: int = 0  # steps of this turn
    round: int = -1

    @staticmethod
    def of_host(folder: str, name: str, steps: int) -> Turns:
        return Turns(Path(folder), name, steps, os.environ[HOST], steps)

    def wait(self) -> None:
        """Return when the next step may run."""
        if self.made == self.steps:
            go = self.folder / f"{self.name}.{self.host}.go"
            if not go.exists():
                os.mkfifo(go)
            put(self.folder / f"{self.name}.{self.host}", str(self.round))
            self.round, self.made = int(go.read_text()), 0
        self.made += 1


def give(folder: Path, name: str, number: int, hosts: int) -> None:
    """Let a program, whose hosts all wait, make the steps of its next turn."""
    for host in range(hosts):
        end = time.monotonic() + _PATIENCE_S
        while (pipe := _opened(folder / f"{name}.{host}.go")) < 0:
            if time.monotonic() > end:
                raise SystemExit(f"{name}: host {host} does not wait for its turn {number}")
            time.sleep(_LOOK_S)
        os.write(pipe, str(number).encode())
        os.close(pipe)


def _opened(pipe: Path) -> int:
    """Return a pipe to write to, -1 while nobody reads it."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return -1


def ended(folder: Path, name: str, number: int, hosts: int) -> bool:
    """Return whether all hosts of a program have ended a turn."""
    files = [folder / f"{name}.{host}" for host in range(hosts)]
    return all(file.exists() and file.read_text() == str(number) for file in files)


def put(file: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    beside = file.with_name(f"{file.name}.beside")
    beside.write_text(text)
    beside.replace(file)


def main() -> int:
    from gossamer.cli import main as command
    from gossamer.run.trainer import Trainer

    folder, name, steps = sys.argv[1:4]
    turns, one_step = Turns.of_host(folder, name, int(steps)), Trainer.one_step

    def in_turn(self: Trainer) -> int:
        turns.wait()
        return one_step(self)

    Trainer.one_step = in_turn  # type: ignore[method-assign]
    sys.argv = ["gossamer", *sys.argv[4:]]
    return command()


if __name__ == "__main__":
    sys.exit(main())
