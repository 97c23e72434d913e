"""Identity: the numbers as they are, four bytes each.

Equations: decoded = x, bit for bit.
Wire:    4 numel bytes.
Good when: one direction of something that takes a codec must stay exact.   Not for: saving bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits


@dataclass(frozen=True, slots=True)
class Float32(Codec):
    """A codec that copies float32 numbers as they are."""

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(unbiased=True, contraction=1.0, lossless=True)

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: Tensor, key: Key) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        return message.clone(memory_format=torch.contiguous_format).view(torch.float32)
