"""Plain: tensors and gradients as they are, in their own type.

Equations: received = sent, bit for bit, whatever the type.
Wire:    the tensor's own bytes, the gradient's own bytes.   State: none.   Work: none (no copy where contiguous).
Good when: the link is fast, or the tensor is not of floating-point numbers (masks, positions).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.compress.codec import Key
from gossamer.compress.transfer.crossing import Crossing, Form
from gossamer.compress.transfer.crossing._bytes import from_bytes, to_bytes
from gossamer.wire.message import State


@dataclass(frozen=True, slots=True)
class Plain(Crossing):
    """No fields: there is nothing to set."""

    @property
    def lossless(self) -> bool:
        return True

    def nbytes(self, form: Form) -> int:
        return form.nbytes

    def nbytes_back(self, form: Form) -> int:
        return form.nbytes

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, State]:
        return to_bytes(None, x.reshape(-1), key), State()

    def decode(self, message: Tensor, form: Form, key: Key) -> tuple[Tensor, State]:
        return from_bytes(None, message, form.numel, form.dtype, key).view(form.shape), State()

    def encode_back(self, gradient: Tensor, memory: State, key: Key) -> Tensor:
        return self.encode(gradient, key)[0]

    def decode_back(self, message: Tensor, form: Form, memory: State, key: Key) -> Tensor:
        return self.decode(message, form, key)[0]
