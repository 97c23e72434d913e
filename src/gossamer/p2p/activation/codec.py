"""Coded: tensors and gradients through codecs that keep every number, in fewer bits.

Equations:
    received = D(C(x));   gradient of x := D'(C'(g)),   g the gradient of what was received
Symbols: C `codec`; C' `return_codec` (the same codec where none is given). The decoding counts as the identity in
backward.
Wire:    codec.nbytes(numel) forward, back.nbytes(numel) backward.   State: none.
Work:    one encoding and one decoding each way.
Paper:   activations and gradients of a pipeline in few bits, AQ-SGD's direct baseline, arXiv 2206.01299.
Good when: the link is slower than encoding; eight bits are safe.   Not for: four bits and less without a look at the
loss: errors of activations are not fed back.   An unbiased codec (stochastic rounding) keeps gradients unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.comm.message import ExchangeState
from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec
from gossamer.p2p.activation import ActivationCodec, TensorSpec
from gossamer.p2p.activation._tensor_bytes import check_codec, check_floating, from_bytes, nbytes_of, to_bytes


@dataclass(frozen=True, slots=True)
class CodecCompression(ActivationCodec):
    """Activation compression by element codecs: `codec` for tensors, `return_codec` for gradients (None: the same)."""

    codec: Codec
    return_codec: Codec | None = None

    def __post_init__(self) -> None:
        check_codec(self.codec, "codec")
        check_codec(self.return_codec, "return_codec")

    @property
    def lossless(self) -> bool:
        return self.codec.traits.lossless and (self.return_codec or self.codec).traits.lossless

    def nbytes(self, form: TensorSpec) -> int:
        return nbytes_of(self.codec, form.numel, form.dtype)

    def nbytes_back(self, form: TensorSpec) -> int:
        return nbytes_of(self.return_codec or self.codec, form.numel, form.dtype)

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ExchangeState]:
        return to_bytes(self.codec, x.reshape(-1), key), ExchangeState()

    def decode(self, message: Tensor, form: TensorSpec, key: Key) -> tuple[Tensor, ExchangeState]:
        return from_bytes(self.codec, message, form.numel, form.dtype, key).view(form.shape), ExchangeState()

    def encode_back(self, gradient: Tensor, memory: ExchangeState, key: Key) -> Tensor:
        return to_bytes(self.return_codec or self.codec, gradient.reshape(-1), key)

    def decode_back(self, message: Tensor, form: TensorSpec, memory: ExchangeState, key: Key) -> Tensor:
        return from_bytes(self.return_codec or self.codec, message, form.numel, form.dtype, key).view(form.shape)

    def check(self, form: TensorSpec) -> None:
        check_floating(form.dtype, coded=True)
