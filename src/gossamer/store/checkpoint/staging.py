"""Staging buffers in host memory: the copy into them is the only part of a save that training waits for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gossamer.store.slices import NamedSlice, Slice


class Staging:
    """The host buffers kept from save to save, one per slice; pinned where the source is on a CUDA device."""

    def __init__(self) -> None:
        self._buffers: dict[Slice, Tensor] = {}

    def copy(self, pieces: Iterable[NamedSlice]) -> list[NamedSlice]:
        """Return contiguous host copies of `pieces`, finished when this returns; they overwrite those of the previous
        call.
        """
        old, self._buffers = self._buffers, {}
        copied: list[NamedSlice] = []
        on_device = False
        for where, tensor in pieces:
            tensor = tensor.detach()
            buffer = _fitting(old.pop(where, None), tensor)
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
            on_device = on_device or tensor.is_cuda
            self._buffers[where] = buffer
            copied.append((where, buffer))
        if on_device:
            torch.cuda.synchronize()
        return copied


def _fitting(buffer: Tensor | None, source: Tensor) -> Tensor:
    if buffer is not None and buffer.dtype == source.dtype and buffer.shape == source.shape:
        return buffer
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
