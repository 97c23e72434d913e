"""Plain: tensors and gradients as they are, in their own type.

Equations: received = sent, bit for bit, whatever the type.
Wire:    the tensor's own bytes, the gradient's own bytes.   State: none.   Work: none (no copy where contiguous).
Good when: the link is fast, or the tensor is not of floating-point numbers (masks, positions).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.comm.message import ExchangeState
from gossamer.comm.random_key import Key
from gossamer.p2p.activation import ActivationCodec, TensorSpec
from gossamer.p2p.activation._tensor_bytes import from_bytes, to_bytes


@dataclass(frozen=True, slots=True)
class NoCompression(ActivationCodec):
    """An activation codec that sends tensors and gradients unchanged; it has no parameters."""

    @property
    def lossless(self) -> bool:
        return True

    def nbytes(self, form: TensorSpec) -> int:
        return form.nbytes

    def nbytes_back(self, form: TensorSpec) -> int:
        return form.nbytes

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ExchangeState]:
        return to_bytes(None, x.reshape(-1), key), ExchangeState()

    def decode(self, message: Tensor, form: TensorSpec, key: Key) -> tuple[Tensor, ExchangeState]:
        return from_bytes(None, message, form.numel, form.dtype, key).view(form.shape), ExchangeState()

    def encode_back(self, gradient: Tensor, memory: ExchangeState, key: Key) -> Tensor:
        return self.encode(gradient, key)[0]

    def decode_back(self, message: Tensor, form: TensorSpec, memory: ExchangeState, key: Key) -> Tensor:
        return self.decode(message, form, key)[0]
