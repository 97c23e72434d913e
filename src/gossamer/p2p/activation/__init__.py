"""Crossings: how a tensor crosses from one rank to another and how its gradient comes back, one per file.

Both sides know the form of the tensor before the step, so both know every size; nothing is sent to describe a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from gossamer.comm.message import ExchangeState
from gossamer.comm.random_key import Key
from gossamer.spec.registry import Registry


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor that crosses, and of its gradient; `device` is where it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of(x: Tensor) -> TensorSpec:
        """The form of `x`."""
        return TensorSpec(tuple(x.shape), x.dtype, x.device)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"


class ActivationCodec(ABC):
    """A frozen dataclass. What one side must remember until the gradient crosses is a State that it is handed back."""

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether tensors and gradients arrive bit for bit."""

    @abstractmethod
    def nbytes(self, form: TensorSpec) -> int:
        """Bytes of the message of a tensor, exactly."""

    @abstractmethod
    def nbytes_back(self, form: TensorSpec) -> int:
        """Bytes of the message of its gradient, exactly."""

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ExchangeState]:
        """The message, (nbytes,) uint8, perhaps in x's own storage, and what the sender remembers."""

    @abstractmethod
    def decode(self, message: Tensor, form: TensorSpec, key: Key) -> tuple[Tensor, ExchangeState]:
        """The tensor, perhaps in the message's storage, and what the receiver remembers."""

    @abstractmethod
    def encode_back(self, gradient: Tensor, memory: ExchangeState, key: Key) -> Tensor:
        """The message of the gradient of what was received; (nbytes_back,) uint8."""

    @abstractmethod
    def decode_back(self, message: Tensor, form: TensorSpec, memory: ExchangeState, key: Key) -> Tensor:
        """The gradient of what was sent."""

    def check(self, form: TensorSpec) -> None:
        """Raises BadInput where tensors of this form cannot cross so: asked when a plan is built."""
        return None


REGISTRY: Registry[ActivationCodec] = Registry(__name__, ActivationCodec)
names = REGISTRY.names
build = REGISTRY.build
