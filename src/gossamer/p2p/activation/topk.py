"""TopK: the largest entries of a tensor cross, and the gradient of just these comes back.

Equations:
    S        = places of the k largest |x| of every row (or of the whole tensor),  k = max(1, round(fraction width))
    received = x on S, 0 elsewhere
    masked:            gradient of x = g on S, 0 elsewhere: the exact gradient of the selection; both sides know S
    straight through:  gradient of x = g on its own k largest places, taken for the gradient of all of x
Symbols: x (rows, width), the last dimension being a row; g the gradient of what was received.
Wire:    values in their own type or through `values`; then places, 2 or 4 bytes each or one bit per entry, whichever
         is less. Masked gradients are values alone. k = width is the plain tensor, bit for bit.
State:   the places, until the gradient has crossed.   Work: a selection over numel, forward only where masked.
Paper:   AdaTopK of FusionLLM, arXiv 2410.12707 (whose ratio per link is the planner's to choose).
Good when: a link is much slower than the others and keeps 1/32 or more.   Not for: ratios beyond 50 (activations are
not gradients, and nothing is fed back).
Unlike the paper: per row by default, since a few outlier tokens would take the whole budget; masked by default; places
in as few bytes as they need instead of eight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.message import ExchangeState
from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec
from gossamer.p2p.activation import ActivationCodec, TensorSpec
from gossamer.p2p.activation._tensor_bytes import check_codec, check_floating, from_bytes, nbytes_of, to_bytes
from gossamer.p2p.activation._topk_indices import TopKIndices
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class TopKCompression(ActivationCodec):
    """An activation codec that sends `fraction` of the elements of every row, or of the whole tensor without `per_row`.

    masked: the gradient comes back for these elements alone; values: codec of the values, None to send them unchanged.
    """

    fraction: float = 0.1
    per_row: bool = True
    masked: bool = True
    values: Codec | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise bad_input(
                wanted="0 < fraction <= 1", got=repr(self.fraction), do="set it to 0.1, for example", key="fraction"
            )
        check_codec(self.values, "values")

    @property
    def lossless(self) -> bool:
        return self.fraction == 1 and self.values is None

    def nbytes(self, form: TensorSpec) -> int:
        places = self._places(form)
        return self._values_nbytes(places, form) + places.nbytes

    def nbytes_back(self, form: TensorSpec) -> int:
        return self._values_nbytes(self._places(form), form) if self.masked else self.nbytes(form)

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ExchangeState]:
        where = self._places(TensorSpec.of(x))
        rows = x.reshape(where.rows, where.width)
        if where.is_all:
            return self._to_bytes(rows, key), ExchangeState()
        places = where.largest(rows)  # (rows, k)
        message = torch.cat((self._to_bytes(rows.gather(-1, places), key), where.to_bytes(places)))
        return message, self._memory(where, places)

    def decode(self, message: Tensor, form: TensorSpec, key: Key) -> tuple[Tensor, ExchangeState]:
        where = self._places(form)
        cut = self._values_nbytes(where, form)
        values = self._from_bytes(message[:cut], where, form, key)
        if where.is_all:
            return values.view(form.shape), ExchangeState()
        places = where.from_bytes(message[cut:])
        return where.scattered(values, places).view(form.shape), self._memory(where, places)

    def encode_back(self, gradient: Tensor, memory: ExchangeState, key: Key) -> Tensor:
        where = self._places(TensorSpec.of(gradient))
        if not self.masked or where.is_all:
            return self.encode(gradient, key)[0]
        rows = gradient.reshape(where.rows, where.width)
        return self._to_bytes(rows.gather(-1, memory.tensors["places"].long()), key)

    def decode_back(self, message: Tensor, form: TensorSpec, memory: ExchangeState, key: Key) -> Tensor:
        where = self._places(form)
        if not self.masked or where.is_all:
            return self.decode(message, form, key)[0]
        values = self._from_bytes(message, where, form, key)
        return where.scattered(values, memory.tensors["places"].long()).view(form.shape)

    def check(self, form: TensorSpec) -> None:
        check_floating(form.dtype, coded=self.values is not None)

    def _places(self, form: TensorSpec) -> TopKIndices:
        width = form.shape[-1] if self.per_row and form.shape else form.numel
        rows = form.numel // width if width else 0
        return TopKIndices(rows, width, min(width, max(1, round(self.fraction * width))))

    def _memory(self, where: TopKIndices, places: Tensor) -> ExchangeState:
        return ExchangeState({"places": places.to(where.dtype)} if self.masked else {})

    def _values_nbytes(self, where: TopKIndices, form: TensorSpec) -> int:
        return nbytes_of(self.values, where.rows * where.count, form.dtype)

    def _to_bytes(self, values: Tensor, key: Key) -> Tensor:
        return to_bytes(self.values, values.reshape(-1), key)

    def _from_bytes(self, message: Tensor, where: TopKIndices, form: TensorSpec, key: Key) -> Tensor:
        flat = from_bytes(self.values, message, where.rows * where.count, form.dtype, key)
        return flat.view(where.rows, where.count)
