"""Compile the kernels of an exchange's codecs before they are needed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import torch

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec
from gossamer.ops import fused


def compile_kernels(method: object, device: torch.device) -> None:
    """Encode and decode a little with every codec that `method`, an exchange or a codec, holds, if it has kernels here.

    What is compiled and compared then (`ops.fused`) takes its time, seconds on a GPU, that the first step would take.
    """
    if not fused.has_kernels(device):
        return
    if isinstance(method, Codec):
        key, x = Key(shared=0, own=0), torch.ones(method.block + 1, device=device)
        method.add(x, method.encode(x, key), 1.0, key)
        method.decode(method.encode_losing(x, key, x), len(x), key)
    if is_dataclass(method):
        for field in fields(method):
            compile_kernels(getattr(method, field.name), device)
