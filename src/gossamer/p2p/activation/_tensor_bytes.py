"""Convert tensors to bytes and back: unchanged, or through a codec."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec
from gossamer.spec.errors import bad_input


def nbytes_of(codec: Codec | None, numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of `numel` elements of `dtype`, encoded by `codec` (None: unchanged)."""
    return numel * dtype.itemsize if codec is None or not numel else codec.nbytes(numel)


def to_bytes(codec: Codec | None, rows: Tensor, key: Key) -> Tensor:
    """Encode (..., numel) as (..., nbytes_of) uint8, row by row; without a codec perhaps as a view."""
    if codec is not None and rows.numel():
        return codec.encode(rows.float().contiguous(), key)
    raw = rows.contiguous()
    if not raw.numel():
        width = nbytes_of(codec, raw.shape[-1], raw.dtype)
        return torch.empty((*raw.shape[:-1], width), dtype=torch.uint8, device=raw.device)
    return raw.view(torch.uint8)


def from_bytes(codec: Codec | None, message: Tensor, numel: int, dtype: torch.dtype, key: Key) -> Tensor:
    """Decode a message to (..., numel) of `dtype`; without a codec perhaps as a view."""
    if not message.numel():
        return torch.empty((*message.shape[:-1], numel), dtype=dtype, device=message.device)
    if codec is not None:
        return codec.decode(message, numel, key).to(dtype)
    aligned = message.is_contiguous() and message.storage_offset() % dtype.itemsize == 0
    return (message if aligned else message.clone(memory_format=torch.contiguous_format)).view(dtype)


def check_codec(codec: Codec | None, key: str) -> None:
    """Raise BadInput for a codec whose message size both sides do not know in advance."""
    if codec is not None and not codec.traits.fixed_size:
        raise bad_input(
            wanted="a codec whose messages have a fixed size, as the receiver allocates memory before a message "
            "arrives",
            got=type(codec).__name__,
            do="choose another codec (gossamer methods exchange/codec), or none to send tensors uncompressed",
            key=key,
        )


def check_floating(dtype: torch.dtype, *, coded: bool) -> None:
    """Raise BadInput for a dtype that is not floating point, or that a codec (of float32) would narrow (`coded`)."""
    if not dtype.is_floating_point or (coded and dtype.itemsize > 4):
        raise bad_input(
            wanted="fp32, bf16 or fp16 tensors to compress",
            got=str(dtype),
            do="set plan.activation_compression to none for this stage boundary",
        )
