"""Activation codecs: encode a tensor that one rank sends to another, and its gradient back; one codec per file.

Both sides know shape and dtype of the tensor before the step, and so every size: no message describes them.
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
    """The shape and dtype of a tensor that is sent, and of its gradient; `device` is that of the received tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of(x: Tensor) -> TensorSpec:
        """Return the shape, dtype and device of `x`."""
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
    """The base class of codecs for activations and their gradients; each is a frozen dataclass.

    What a side needs later to encode or decode the gradient is an ExchangeState that it is given back.
    """

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether tensors and gradients arrive bit for bit."""

    @abstractmethod
    def nbytes(self, form: TensorSpec) -> int:
        """Return the exact bytes of the message of a tensor."""

    @abstractmethod
    def nbytes_back(self, form: TensorSpec) -> int:
        """Return the exact bytes of the message of its gradient."""

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ExchangeState]:
        """Encode `x`; return the message and the sender's state.

        The message is (nbytes,) uint8, perhaps in x's own storage.
        """

    @abstractmethod
    def decode(self, message: Tensor, form: TensorSpec, key: Key) -> tuple[Tensor, ExchangeState]:
        """Decode a message; return the tensor, perhaps in the message's storage, and the receiver's state."""

    @abstractmethod
    def encode_back(self, gradient: Tensor, memory: ExchangeState, key: Key) -> Tensor:
        """Encode the gradient of the received tensor as (nbytes_back,) uint8."""

    @abstractmethod
    def decode_back(self, message: Tensor, form: TensorSpec, memory: ExchangeState, key: Key) -> Tensor:
        """Decode the gradient of the sent tensor."""

    def check(self, form: TensorSpec) -> None:
        """Raise BadInput where the codec cannot send tensors of this form; called when a plan is built."""
        return None


REGISTRY: Registry[ActivationCodec] = Registry(__name__, ActivationCodec)
names = REGISTRY.names
build = REGISTRY.build
