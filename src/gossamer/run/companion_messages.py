"""What a rank and its companion process say to each other, one JSON object per line; tensors are in shared memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal

from pydantic import TypeAdapter

from gossamer.process.json_lines import JsonLineReader, Said, read_line, write_line
from gossamer.run.shared_tensors import TensorForm

LIMIT_BYTES = 1 << 28  # of a greeting, which has the names of all parameters


class SharedForm(Said):
    """The form of a shared tensor."""

    name: str
    dtype: str
    shape: list[int]

    @staticmethod
    def all_of(forms: Sequence[TensorForm]) -> list[SharedForm]:
        """Return forms as a message has them."""
        return [SharedForm(name=one.name, dtype=one.dtype, shape=list(one.shape)) for one in forms]

    @property
    def form(self) -> TensorForm:
        """Return the form."""
        return TensorForm(self.name, self.dtype, tuple(self.shape))


class Setup(Said):
    """The rank's first message. `config`: the run's, as JSON; `names`: of what a batch has; `weights`, `rows`: what is
    in the two pieces of memory; `threads`: of compute, as many as the rank has, since sums of another number of threads
    differ in their last bits.
    """

    kind: Literal["setup"] = "setup"
    config: str
    units: list[str]
    names: list[str]
    inputs: list[str]
    threads: int
    weights_descriptor: int
    rows_descriptor: int
    weights: list[SharedForm]
    rows: list[SharedForm]


class Batch(Said):
    """The rank's message that the micro-batches of a step are in memory. `keys`: of the micro-batches, by number."""

    kind: Literal["batch"] = "batch"
    step: int
    keys: list[int]


class Ready(Said):
    """The companion's message that its model is built."""

    kind: Literal["ready"] = "ready"


class Done(Said):
    """The companion's message that the perturbed inputs of a micro-batch are in memory."""

    kind: Literal["done"] = "done"
    step: int
    number: int


class Failed(Said):
    """The companion's last message: its error. `is_input`: an error in the user's input, under `key`."""

    kind: Literal["failed"] = "failed"
    why: str
    is_input: bool = False
    key: str = ""


TO_COMPANION: TypeAdapter[Setup | Batch] = TypeAdapter(Setup | Batch)
TO_RANK: TypeAdapter[Ready | Done | Failed] = TypeAdapter(Ready | Done | Failed)


def row_name(number: int, name: str) -> str:
    """Return the name in shared memory of what micro-batch `number` has under `name`."""
    return f"{number}/{name}"


def perturbed_name(number: int, name: str) -> str:
    """Return the name in shared memory of the perturbed input."""
    return f"{number}/{name}, perturbed"


class Messages:
    """One end of the connection between a rank and its companion."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader, self._lines = JsonLineReader(LIMIT_BYTES), list[bytes]()

    def send(self, message: Said) -> None:
        """Send a message. Raises OSError where the other process is gone."""
        self.connection.sendall(write_line(message))

    def receive(self) -> bytes | None:
        """Return the next line, once it is there; None where the other process is gone."""
        while not self._lines:
            try:
                data = self.connection.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._lines += self._reader.feed(data)
        return self._lines.pop(0)

    @property
    def has_line(self) -> bool:
        """Return whether a whole line is there already."""
        return bool(self._lines)

    def heard(self) -> Ready | Done | Failed | None:
        """Return the companion's next message; None where it is gone. Raises WireMismatch."""
        line = self.receive()
        return None if line is None else read_line(line, TO_RANK)

    def told(self) -> Setup | Batch | None:
        """Return the rank's next message; None where it is gone. Raises WireMismatch."""
        line = self.receive()
        return None if line is None else read_line(line, TO_COMPANION)
