"""The leaves of a unit call's output, as a forward was traced: tensors, arguments passed through, Python values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Produced:
    """The shape, dtype, device and layout of a tensor that a unit call makes. `written`: changed in place later."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    written: bool = False
    strides: tuple[int, ...] | None = field(default=None, compare=False)  # None: contiguous

    @staticmethod
    def of(tensor: Tensor) -> Produced:
        """Return the description of `tensor`."""
        strides = None if tensor.layout is not torch.strided or tensor.is_contiguous() else tensor.stride()
        return Produced(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, strides=strides)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape and strides."""
        return self.shape, self.strides or torch.empty(self.shape, device="meta").stride()


class OutputLeaf(ABC):
    """A leaf of a unit call's output."""

    @property
    def is_python(self) -> bool:
        """Return whether the leaf is a number, a string or an object, which may be another one in the next forward."""
        return False


class PythonLeaf(OutputLeaf, ABC):
    """A leaf that is no tensor and no argument; other stages put `value` in its place."""

    value: Any


@dataclass(frozen=True, slots=True)
class ConstantLeaf(PythonLeaf):
    """A Python value that other stages can reproduce; None is the most usual."""

    value: Any

    @property
    def is_python(self) -> bool:
        return self.value is not None


@dataclass(frozen=True, slots=True)
class OpaqueLeaf(PythonLeaf):
    """A value of a type that other stages cannot reproduce."""

    kind: str
    value: None = None

    @property
    def is_python(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ArgumentLeaf(OutputLeaf):
    """An argument of the call, passed through as it was. `source`: the index of the argument leaf."""

    source: int


@dataclass(frozen=True, slots=True)
class RepeatedLeaf(OutputLeaf):
    """The same object as an earlier output leaf. `same`: the index of that one."""

    same: int


class TensorLeaf(OutputLeaf, ABC):
    """A tensor that the call has computed."""

    made: Produced

    @abstractmethod
    def written(self) -> TensorLeaf:
        """Return the leaf of a tensor that is changed in place later."""


@dataclass(frozen=True, slots=True)
class MadeLeaf(TensorLeaf):
    """A tensor that the call has made."""

    made: Produced

    def written(self) -> MadeLeaf:
        return MadeLeaf(replace(self.made, written=True))


@dataclass(frozen=True, slots=True)
class OverwrittenLeaf(TensorLeaf):
    """An argument that the call has written in place, and returned. `source`: the index of the argument leaf."""

    made: Produced
    source: int

    def written(self) -> OverwrittenLeaf:
        return OverwrittenLeaf(replace(self.made, written=True), self.source)
