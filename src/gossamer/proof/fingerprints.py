"""Fingerprints of tensors: a few numbers of each, which differ clearly if the tensors do.

    row(x) = (max |x|, |x| / sqrt n, p_1, ..., p_16),   p_k = sum_{i mod 16 = k} s_i x_i / sqrt(n / 16)
with n elements and signs s_i that a key and i determine (ops/fingerprint.py). All columns have the magnitude of an
element, and the root mean square of p(x) - p(y) over keys is that of x - y. A row takes 72 bytes per tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.model.unit_seeds import mix
from gossamer.ops.fingerprint import digest, projected

PLACES = 16
WIDTH = 2 + PLACES
ABSENT = -1.0  # in all columns of a row: this rank has no such tensor. The first column of others is not negative


def key_of(name: str, seed: int) -> int:
    """Return the key of a tensor's signs, which depends on its name and the seed alone."""
    return mix(seed, zlib.crc32(name.encode())) >> 2


def row_of(tensor: Tensor, key: int) -> Tensor:
    """Return the fingerprint row of a tensor, (WIDTH,) float32; an empty tensor has zeros."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.detach().to_dense().reshape(-1)
    if not flat.numel():
        return torch.zeros(WIDTH)
    found = projected([flat], key, width=PLACES)
    largest = flat.abs().max() if flat.is_floating_point() else flat.double().abs().max()
    count = float(flat.numel())
    sizes = torch.tensor([count, *[max(1.0, count / PLACES)] * PLACES], dtype=torch.float64).sqrt()
    return torch.cat([largest.double().cpu().reshape(1), found / sizes]).float()


def rows_of(tensors: Mapping[str, Tensor | None], names: Sequence[str], seed: int) -> Tensor:
    """Return the fingerprint rows of `tensors` in the order of `names`, (names, WIDTH) float32.

    A row is -1 where this rank has no such tensor, and 0 where the tensor is None (no rank has a gradient).
    """
    found = torch.full((len(names), WIDTH), ABSENT)
    for place, name in enumerate(names):
        if name in tensors:
            tensor = tensors[name]
            found[place] = 0.0 if tensor is None else row_of(tensor, key_of(name, seed))
    return found


def digests_of(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return exact digests in the order of `names`, (names, 3) float64: 64 bits of each tensor as two numbers, and its
    norm.

    A row is -1 where this rank has no such tensor.
    """
    found = torch.full((len(names), 3), ABSENT, dtype=torch.float64)
    for place, name in enumerate(names):
        if name in tensors:
            tensor = tensors[name].detach()
            number = digest([tensor], key_of(name, 0))
            norm = float(tensor.double().norm()) if not tensor.is_complex() else 0.0
            found[place] = torch.tensor([number >> 32, number % 2**32, norm], dtype=torch.float64)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The canonical tensor names of the unsharded model, in backward order: the tensors that the end of the forward
    reads come first.
    """

    values: tuple[str, ...]  # parameters and buffers
    trained: tuple[str, ...]
    buffers: tuple[str, ...]
    eps: tuple[float, ...]  # of every trained one: relative rounding unit of its gradient


@dataclass(frozen=True, slots=True)
class FingerprintTable:
    """The fingerprints, losses and digests that one side computes for all rounds, as far as this rank knows them."""

    initial: Tensor  # (values, 3) float64
    gradients: Tensor  # (rounds, trained, WIDTH) float32
    buffers: Tensor  # (rounds, buffers, WIDTH) float32: after the first replica's micro-batches of a round
    losses: Tensor  # (rounds, micro-batches) float64; nan: unknown on this rank, inf: not finite
    first: Tensor  # as `gradients`, of the first replica alone; only from one process
    # (3,) float64: whether replicas keep own state, whether in parameters, and the buffer that has it,
    # as a 1-based index into names (0: none)
    keeps: Tensor

    def flat(self) -> Tensor:
        """Return the whole table as one float64 vector, which has the same length on all ranks."""
        return torch.cat([part.double().reshape(-1) for part in self._parts()])

    def like(self, flat: Tensor) -> FingerprintTable:
        """Return the table encoded in `flat`, with the shapes of this table."""
        pieces = flat.split([part.numel() for part in self._parts()])  # type: ignore[no-untyped-call]
        return FingerprintTable(*(piece.view(part.shape) for piece, part in zip(pieces, self._parts(), strict=True)))

    def _parts(self) -> tuple[Tensor, ...]:
        return self.initial, self.gradients, self.buffers, self.losses, self.first, self.keeps

    @staticmethod
    def blank(names: TensorNames, rounds: int, microbatches: int) -> FingerprintTable:
        """Return the table of a rank that knows no value: -1 for absent tensors, nan for unknown losses."""
        return FingerprintTable(
            initial=torch.full((len(names.values), 3), ABSENT, dtype=torch.float64),
            gradients=torch.full((rounds, len(names.trained), WIDTH), ABSENT),
            buffers=torch.full((rounds, len(names.buffers), WIDTH), ABSENT),
            losses=torch.full((rounds, microbatches), torch.nan, dtype=torch.float64),
            first=torch.full((rounds, len(names.trained), WIDTH), ABSENT),
            keeps=torch.zeros(3, dtype=torch.float64),
        )
