"""Formats of frozen weights: how the matrix of a linear layer is held in blocks and read again; one format per file.

`gossamer.model.quantized_linear` computes with them, `gossamer.model.quantize_base` puts them into a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.registry import Registry

_SLAB = 1 << 18  # elements that are decoded at a time, so that what decoding computes with stays small


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in blocks: `codes` (rows, ...) and `scales` (rows, ...); None where the codes hold their own scales."""

    codes: Tensor
    scales: Tensor | None

    @property
    def nbytes(self) -> int:
        """Return the bytes of both."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def rows(self, start: int, stop: int) -> Blocks:
        """Return some of the rows, in the same memory."""
        return Blocks(self.codes[start:stop], None if self.scales is None else self.scales[start:stop])


class WeightFormat(ABC):
    """The base class of formats; each is a frozen dataclass. A block lies within a row: rows can be reordered."""

    @abstractmethod
    def empty(self, rows: int, columns: int, device: torch.device | None = None) -> Blocks:
        """Return blocks of a (rows, columns) matrix whose values are not set. Raises BadInput for a width it lacks."""

    @abstractmethod
    def encode(self, weight: Tensor) -> Blocks:
        """Return (rows, columns) finite numbers of any floating type as blocks. Raises BadInput if it cannot."""

    @abstractmethod
    def decode(self, blocks: Blocks, columns: int) -> Tensor:
        """Return the matrix (rows, columns) in float32, or the type that the blocks are of; new memory, or a view."""

    def decoded(self, blocks: Blocks, columns: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the matrix (rows, columns) in `dtype`, decoded in slabs of rows: in `out`, or in new memory."""
        rows = blocks.codes.shape[0]
        if out is None:
            out = torch.empty(rows, columns, dtype=dtype, device=blocks.codes.device)
        step = max(1, _SLAB // max(1, columns))
        for start in range(0, rows, step):
            out[start : start + step] = self.decode(blocks.rows(start, start + step), columns)
        return out


REGISTRY = Registry(__name__, WeightFormat)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build
