"""Fingerprint of a batch, to check that all ranks have the same one."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.ops.fingerprint import digest
from gossamer.own_loop.batch_structure import leaves

_SAMPLED_BYTES = 1 << 20  # larger tensors are hashed by evenly spaced samples


def fingerprint(batch: Any) -> int:
    """Return a 32-bit hash of all numbers and strings of a batch; of large tensors a sample counts."""
    found = 0
    for path, leaf in leaves(batch):
        found = zlib.crc32(f"{path}{type(leaf).__name__}".encode(), found)
        if isinstance(leaf, Tensor):
            found = zlib.crc32(f"{tuple(leaf.shape)}{leaf.dtype}".encode(), found)
            found = _of_numbers(leaf, found)
        elif isinstance(leaf, np.ndarray):
            found = zlib.crc32(np.ascontiguousarray(leaf).data, found) if leaf.dtype != object else found
        elif isinstance(leaf, list | tuple | str | int | float):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def _of_numbers(tensor: Tensor, found: int) -> int:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return found
    if tensor.device.type != "cpu":
        return zlib.crc32(
            digest([torch.view_as_real(tensor) if tensor.is_complex() else tensor], 0).to_bytes(8, "big"), found
        )
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    if flat.nbytes > _SAMPLED_BYTES:
        pieces = 256
        each, stride = _SAMPLED_BYTES // pieces, flat.nbytes // pieces
        flat = np.concatenate([flat[at : at + each] for at in range(0, pieces * stride, stride)])
    return zlib.crc32(flat.data, found) if flat.nbytes else found
