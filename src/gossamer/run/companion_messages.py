"""What a rank and its companion process say to each other, one JSON object per line; tensors are in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import TypeAdapter

from gossamer.process.companion_link import Failed
from gossamer.process.json_lines import Said
from gossamer.run.shared_tensors import TensorForm


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


TO_COMPANION: TypeAdapter[Setup | Batch] = TypeAdapter(Setup | Batch)
TO_RANK: TypeAdapter[Ready | Done | Failed] = TypeAdapter(Ready | Done | Failed)


def row_name(number: int, name: str) -> str:
    """Return the name in shared memory of what micro-batch `number` has under `name`."""
    return f"{number}/{name}"


def perturbed_name(number: int, name: str) -> str:
    """Return the name in shared memory of the perturbed input."""
    return f"{number}/{name}, perturbed"
