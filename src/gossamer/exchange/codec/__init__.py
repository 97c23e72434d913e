"""Codecs: float32 numbers to bytes and back, stateless, one per file. They serve every wire: gradients (inside an
exchange such as `two_shot`), pipeline activations, expert rows, weight gathers, outer deltas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.spec.registry import Registry


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """What an exchange may rely on; contract tests check every field.

    unbiased:    E decode(encode(x)) = x over keys.
    contraction: delta > 0 with E|x - decode(encode(x))|^2 <= (1 - delta)|x|^2 for every finite x; None: there is none.
                 Numbers below 1e-36 may be lost whatever is declared.
    lossless:    decode(encode(x)) is x, bit for bit.
    fixed_size:  `nbytes` is exact; otherwise it is a cap, and messages are as long as they need to be.
    """

    unbiased: bool = False
    contraction: float | None = None
    lossless: bool = False
    fixed_size: bool = True


class Codec(ABC):
    """A frozen dataclass. Leading dimensions are rows, encoded one by one but all at once.

    Not-a-number and infinity are never hidden: what is decoded of the block they stand in is not finite either.
    """

    @property
    @abstractmethod
    def traits(self) -> CodecTraits:
        """What may be relied on."""

    @property
    def block(self) -> int:
        """Rows whose length is a multiple of it are encoded without padding."""
        return 1

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the message of `numel` numbers; a multiple of 4, so that rows stay aligned."""

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> Tensor:
        """(..., numel) float32, not changed, to (..., nbytes(numel)) uint8."""

    @abstractmethod
    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        """(..., nbytes(numel)) uint8 to a new (..., numel) float32. Uses `key.shared` alone: `own` differs."""

    def encode_losing(self, x: Tensor, key: Key, lost: Tensor) -> Tensor:
        """The message of `encode`; what it loses, x - decode(message), is written to `lost`, which may be x itself."""
        message = self.encode(x, key)
        torch.sub(x, self.decode(message, x.shape[-1], key), out=lost)
        return message

    def add(self, total: Tensor, message: Tensor, share: float, key: Key) -> None:
        """total (numel,) += share decode(message), in place."""
        total.add_(self.decode(message, total.numel(), key), alpha=share)

    def mean(self, messages: Tensor, numel: int, shares: Sequence[float], key: Key) -> Tensor:
        """sum_i shares[i] decode(messages[i]), (n, nbytes) to (numel,), summed in row order: the same on every rank."""
        total = self.decode(messages[0], numel, key).mul_(shares[0])
        for message, share in zip(messages[1:], shares[1:], strict=True):
            self.add(total, message, share, key)
        return total


REGISTRY: Registry[Codec] = Registry(__name__, Codec)
names = REGISTRY.names
build = REGISTRY.build
