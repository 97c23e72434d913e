"""Codecs: encode float32 numbers to bytes and decode them, stateless, one per file.

Exchanges such as `two_shot`, pipeline activations, sharded parameters and pseudo-gradients all use them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Layout
from gossamer.comm.random_key import Key
from gossamer.spec.errors import bad_input
from gossamer.spec.registry import Registry


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """The properties of a codec that callers may rely on; contract tests check every field.

    unbiased:    E decode(encode(x)) = x over keys.
    contraction: delta > 0 with E|x - decode(encode(x))|^2 <= (1 - delta)|x|^2 for every finite x; None: there is none.
                 Numbers below 1e-36 may be lost whatever is declared.
    lossless:    decode(encode(x)) is x, bit for bit.
    fixed_size:  `nbytes` is exact; otherwise it is an upper limit, and messages may be shorter.
    """

    unbiased: bool = False
    contraction: float | None = None
    lossless: bool = False
    fixed_size: bool = True


class Codec(ABC):
    """A codec: a frozen dataclass of settings. Leading dimensions of a tensor are rows, each encoded by itself.

    NaN and infinity are never hidden: the decoded block that contains one is not finite either.
    """

    @property
    @abstractmethod
    def traits(self) -> CodecTraits:
        """Return the properties callers may rely on."""

    @property
    def block(self) -> int:
        """Return the block length: rows with a multiple of it are encoded without padding."""
        return 1

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message of `numel` numbers; a multiple of 4, so that rows stay aligned."""

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> Tensor:
        """Encode (..., numel) float32, not changed, to (..., nbytes(numel)) uint8."""

    @abstractmethod
    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        """Decode (..., nbytes(numel)) uint8 to a new (..., numel) float32.

        Use `key.shared` only: `own` differs by rank.
        """

    def encode_losing(self, x: Tensor, key: Key, lost: Tensor) -> Tensor:
        """Encode x and write its compression error, x - decode(message), to `lost`, which may be x itself."""
        message = self.encode(x, key)
        torch.sub(x, self.decode(message, x.shape[-1], key), out=lost)
        return message

    def add(self, total: Tensor, message: Tensor, share: float, key: Key) -> None:
        """Add share decode(message) to total (numel,), in place."""
        total.add_(self.decode(message, total.numel(), key), alpha=share)

    def mean(self, messages: Tensor, numel: int, shares: Sequence[float], key: Key) -> Tensor:
        """Return sum_i shares[i] decode(messages[i]), (n, nbytes) to (numel,), in row order, alike on all ranks."""
        total = self.decode(messages[0], numel, key).mul_(shares[0])
        for message, share in zip(messages[1:], shares[1:], strict=True):
            self.add(total, message, share, key)
        return total


def check_width(layout: Layout, *codecs: Codec) -> None:
    """Raise BadInput for float64 numbers through codecs that lose nothing of float32: they would round in silence."""
    if layout.dtype is torch.float64 and all(one.traits.lossless for one in codecs):
        raise bad_input(
            wanted="numbers of at most 32 bits, of which the codec loses nothing",
            got=f"{layout.entries[0].name} and others in float64, and {codecs[0]!r}" if layout.entries else "float64",
            do="use dense, star or recursive_doubling for these parameters, which send all 64 bits",
        )


REGISTRY: Registry[Codec] = Registry(__name__, Codec)
names = REGISTRY.names
build = REGISTRY.build
