"""What a rank and its update process say to each other, one JSON object per line; gradients are in shared memory."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import TypeAdapter

from gossamer.process.companion_link import Failed
from gossamer.process.json_lines import Said
from gossamer.sharding import TierGroup, TierLayout, TierTensor


class TensorAt(Said):
    """A tensor of a record (see TierTensor)."""

    name: str
    slot: str
    shape: list[int]
    dtype: str
    start: int

    @staticmethod
    def of(one: TierTensor) -> TensorAt:
        """Return a tensor as a message has it."""
        dtype = str(one.dtype).removeprefix("torch.")
        return TensorAt(name=one.name, slot=one.slot, shape=list(one.shape), dtype=dtype, start=one.start)

    @property
    def tensor(self) -> TierTensor:
        """Return the tensor."""
        return TierTensor(self.name, self.slot, tuple(self.shape), getattr(torch, self.dtype), self.start)


class GroupAt(Said):
    """A group of a layout (see TierGroup)."""

    names: list[str]
    tensors: list[TensorAt]
    record_bytes: int
    starts: list[int]
    gradient_start: int
    gradient_bytes: int
    open_bytes: int


class LayoutAt(Said):
    """The layout of a tier file."""

    groups: list[GroupAt]
    size_bytes: int
    keeps_gradients: bool

    @staticmethod
    def of(layout: TierLayout) -> LayoutAt:
        """Return a layout as a message has it."""
        groups = [
            GroupAt(
                names=list(one.names),
                tensors=[TensorAt.of(tensor) for tensor in one.tensors],
                record_bytes=one.record_bytes,
                starts=list(one.starts),
                gradient_start=one.gradient_start,
                gradient_bytes=one.gradient_bytes,
                open_bytes=one.open_bytes,
            )
            for one in layout.groups
        ]
        return LayoutAt(groups=groups, size_bytes=layout.size_bytes, keeps_gradients=layout.keeps_gradients)

    @property
    def layout(self) -> TierLayout:
        """Return the layout."""
        groups = tuple(
            TierGroup(
                names=tuple(one.names),
                tensors=tuple(tensor.tensor for tensor in one.tensors),
                record_bytes=one.record_bytes,
                starts=tuple(one.starts),
                gradient_start=one.gradient_start,
                gradient_bytes=one.gradient_bytes,
                open_bytes=one.open_bytes,
            )
            for one in self.groups
        )
        return TierLayout(groups, self.size_bytes, self.keeps_gradients)


class Setup(Said):
    """The rank's first message. `optimizer`: the setting, as JSON; `rule`: how the rank's own optimizer shows itself.

    `windows`: buffers of a record; `threads`: of compute, as many as the rank has.
    """

    kind: Literal["setup"] = "setup"
    optimizer: str
    rule: str
    layout: LayoutAt
    path: str
    is_direct: bool
    file_descriptor: int
    gradients_descriptor: int
    windows: int
    threads: int


class Update(Said):
    """The rank's message that a group is to be updated. `idle`: numbers of its parameters that do not move.

    `in_memory`: its gradient is in shared memory, else in the file; `skipped`: see UpdateTerms.
    """

    kind: Literal["update"] = "update"
    group: int
    record: int
    in_memory: bool
    idle: list[int]
    lr_scale: float
    step: int
    scale: float
    skipped: dict[str, int]


class Keep(Said):
    """The rank's message that the gradient of a group is to be written to the file."""

    kind: Literal["keep"] = "keep"
    group: int


class Ready(Said):
    """The process's message that it is built."""

    kind: Literal["ready"] = "ready"


class Freed(Said):
    """The process's message that it has given back the memory of a gradient."""

    kind: Literal["freed"] = "freed"
    group: int


class Done(Said):
    """The process's message that a group is updated and written, or kept. Bytes and seconds: since it was started."""

    kind: Literal["done"] = "done"
    group: int
    is_written: bool
    moved_bytes: int
    busy_s: float


TO_PROCESS: TypeAdapter[Setup | Update | Keep] = TypeAdapter(Setup | Update | Keep)
TO_RANK: TypeAdapter[Ready | Freed | Done | Failed] = TypeAdapter(Ready | Freed | Done | Failed)
