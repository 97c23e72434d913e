"""gguf: the blocks of a tensor in a GGUF file as they are, lossless: decoded bit for bit as the package gguf does.

`type` is llama.cpp's: Q8_0, Q4_0, Q4_1, Q4_K and Q6_K are decoded with torch, all other types of the package through
the package itself. Every operation is the package's, in its order and in float32 (gguf/quants.py); layout of blocks:
ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.model.quantized import Blocks, WeightFormat
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest
from gossamer.store.gguf_write import gguf_package


@dataclass(frozen=True)
class Gguf(WeightFormat):
    """The format of a GGUF tensor of one type, e.g. Q4_1."""

    type: str

    def empty(self, rows: int, columns: int, device: torch.device | None = None) -> Blocks:
        return Blocks(torch.empty(rows, self._row_bytes(columns), dtype=torch.uint8, device=device), None)

    def encode(self, weight: Tensor) -> Blocks:
        package, kind = gguf_package(), self._kind
        self._row_bytes(weight.shape[1])
        try:
            made = package.quantize(weight.detach().float().cpu().contiguous().numpy(), kind)
        except NotImplementedError:
            raise bad_input(
                wanted="a GGUF type that the package gguf can encode",
                got=f"{self.type}, which it can only decode",
                do="take Q8_0 or Q4_1, or the GGUF file itself as the model's source",
            ) from None
        return Blocks(torch.from_numpy(np.ascontiguousarray(made).view(np.uint8)).to(weight.device), None)

    def decode(self, blocks: Blocks, columns: int) -> Tensor:
        decode = _WITH_TORCH.get(self.type)
        if decode is None:
            found: Tensor = decode_with_package(blocks.codes, self.type, columns)
            return found
        size = gguf_package().GGML_QUANT_SIZES[self._kind][1]
        return decode(blocks.codes.reshape(-1, size)).reshape(blocks.codes.shape[0], columns)

    @property
    def _kind(self) -> Any:
        kinds = gguf_package().GGMLQuantizationType
        if self.type not in kinds.__members__:
            raise BadInput(f"there is no GGUF type {self.type!r}: {nearest(self.type, kinds.__members__)}")
        return kinds[self.type]

    def _row_bytes(self, columns: int) -> int:
        elements, size = gguf_package().GGML_QUANT_SIZES[self._kind]
        if columns % elements:
            raise bad_input(
                wanted=f"rows of a multiple of {elements} elements for {self.type}",
                got=str(columns),
                do="take int4 or int8, which have blocks of any width",
            )
        return int(columns // elements * size)


@torch.library.custom_op("gossamer::gguf_decode", mutates_args=())
def decode_with_package(codes: Tensor, type: str, columns: int) -> Tensor:
    """Return blocks (rows, bytes) of a GGUF type as (rows, columns) float32, decoded by the package gguf on the CPU.

    An operator of its own, so that tensors without memory (of a model that is only traced) pass through it too.
    """
    package = gguf_package()
    raw = np.ascontiguousarray(codes.cpu().numpy())
    kind = package.GGMLQuantizationType[type]
    if type in ("F32", "F16"):  # the package wants these as numbers
        found = raw.view(np.float32 if type == "F32" else np.float16).astype(np.float32)
    else:
        found = package.dequantize(raw, kind)
    return torch.from_numpy(np.array(found, np.float32).reshape(codes.shape[0], columns)).to(codes.device)


@decode_with_package.register_fake
def _(codes: Tensor, type: str, columns: int) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=torch.float32)


def _half(raw: Tensor) -> Tensor:
    """Return (n, 2 k) bytes as (n, k) float32 numbers that they hold as float16."""
    return raw.contiguous().view(torch.float16).float()


def _low_and_high(raw: Tensor) -> Tensor:
    """Return (..., k) bytes as (..., 2, k) halves of 4 bits: low ones first."""
    return torch.stack((raw & 15, raw >> 4), -2)


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].view(torch.int8).float() * _half(raw[:, :2])


def _q4_0(raw: Tensor) -> Tensor:
    codes = _low_and_high(raw[:, 2:]).flatten(1).to(torch.int8) - 8
    return codes.float() * _half(raw[:, :2])


def _q4_1(raw: Tensor) -> Tensor:
    return _low_and_high(raw[:, 4:]).flatten(1).float() * _half(raw[:, :2]) + _half(raw[:, 2:4])


def _q4_k(raw: Tensor) -> Tensor:
    """Blocks of 256: two float16, 8 scales and 8 minima of 6 bits in 12 bytes, 128 bytes of codes."""
    scale, least = _half(raw[:, :2]), _half(raw[:, 2:4])
    packed = raw[:, 4:16].reshape(-1, 3, 4)
    d, m, both = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = torch.cat((d & 63, (both & 15) | ((d >> 2) & 48)), 1)
    minima = torch.cat((m & 63, (both >> 4) | ((m >> 2) & 48)), 1)
    codes = _low_and_high(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).float()
    made = (scale * scales.float()).unsqueeze(-1) * codes - (least * minima.float()).unsqueeze(-1)
    return made.flatten(1)


def _q6_k(raw: Tensor) -> Tensor:
    """Blocks of 256: 128 bytes of low halves, 64 of upper two bits, 16 scales of 8 bits, one float16."""
    low = _low_and_high(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    upper = raw[:, 128:192].reshape(-1, 2, 1, 32)
    high = torch.cat([(upper >> shift) & 3 for shift in (0, 2, 4, 6)], 2).reshape(-1, 8, 32)
    codes = ((low | (high << 4)).to(torch.int8) - 32).reshape(-1, 16, 16).float()
    scales = _half(raw[:, 208:]) * raw[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * codes).flatten(1)


_WITH_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
