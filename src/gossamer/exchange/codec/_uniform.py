"""Uniform quantization with one float32 step size per block, the base of int8, int4 and ternary."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.ops.blocks import empty_message, part
from gossamer.ops.fused import add_dequantized, dequantize, quantize
from gossamer.spec.errors import bad_input


class UniformQuantizer(Codec):
    """A codec that sends the step sizes, then `bits` per number, padded to 4 bytes.

    Each number is an integer of at most `levels` steps to either side of zero.
    """

    __slots__ = ()
    levels: ClassVar[int]
    bits: ClassVar[int]

    @property
    @abstractmethod
    def rounds_at_random(self) -> bool:
        """Return whether rounding is stochastic, so that the mean is unbiased, and not to nearest."""

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + 4 * -(-numel * self.bits // 32)

    def encode(self, x: Tensor, key: Key) -> Tensor:
        return self._encoded(x, key, None)

    def encode_losing(self, x: Tensor, key: Key, lost: Tensor) -> Tensor:
        return self._encoded(x, key, lost)

    def _encoded(self, x: Tensor, key: Key, lost: Tensor | None) -> Tensor:
        out = empty_message(x, self.nbytes(x.shape[-1]))
        scales, codes = self._parts(out, x.shape[-1])
        rng = key.generator(x.device) if self.rounds_at_random else None
        quantize(x, self.block, self.levels, scales, codes, rng, bits=self.bits, lost=lost)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        scales, codes = self._parts(message, numel)
        return dequantize(codes, scales, self.block, bits=self.bits, numel=numel)

    def add(self, total: Tensor, message: Tensor, share: float, key: Key) -> None:
        scales, codes = self._parts(message, total.numel())
        add_dequantized(total, codes, scales * share, self.block, bits=self.bits)

    def nearest_contraction(self) -> float | None:
        """Return delta of rounding to nearest.

        Its worst case is one large number in a block, all others just below half a step.
        """
        worst = self.block / (2 * self.levels) ** 2
        return 1 - worst if worst < 1 else None

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        blocks, kind = -(-numel // self.block), torch.int8 if self.bits == 8 else torch.uint8
        return part(message, 0, blocks, torch.float32), part(message, 4 * blocks, -(-numel * self.bits // 8), kind)


class BlockInteger(UniformQuantizer):
    """A uniform quantizer to integers of `bits` bits, rounded to nearest, or at random where `stochastic`."""

    __slots__ = ()

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Return the count of numbers that share a step size."""

    @property
    @abstractmethod
    def stochastic(self) -> bool:
        """Return whether numbers are rounded at random, so that their mean is unbiased."""

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(
            unbiased=self.stochastic, contraction=None if self.stochastic else self.nearest_contraction()
        )

    @property
    def block(self) -> int:
        return self.block_size

    @property
    def rounds_at_random(self) -> bool:
        return self.stochastic


def check_block(block_size: int, *, multiple: int, typical: int) -> None:
    """Raise BadInput where a block's bits do not fill whole words."""
    if block_size < multiple or block_size % multiple:
        wanted, do = f"a multiple of {multiple}", f"give {typical}, say"
        raise bad_input(wanted=wanted, got=repr(block_size), do=do, key="block_size")
