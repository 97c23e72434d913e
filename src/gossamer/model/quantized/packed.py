"""packed: 2 to 8 bits per weight in groups within a row, packed without a gap; what `gossamer quantize` writes.

    asymmetric:  m <= min w,   s >= (max w - m) / (2^b - 1),   q = clip(round((w - m) / s), 0, 2^b - 1),   w' = s q + m
    symmetric:   k = 2^(b-1) - 1,   s >= max |w| / k,   q = clip(round(w / s), -k, k),   w' = s q

over the weights w of a group of g neighbors in a row (the last may be shorter), b bits. m is rounded down and s up to
float16 before q is computed, so nothing is clipped: |w - w'| <= s / 2. A code, q or q + 2^(b-1), takes b bits of a
stream that begins with the lowest bit of a row's first byte. Bits per weight: b + 32 / g, or b + 16 / g (symmetric).
Unlike most implementations the asymmetric form keeps the minimum m itself, not the code that stands for zero: as Q4_1
of GGUF, which it can become bit for bit. Symmetric codes leave the lowest one, -2^(b-1), unused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.model.quantized import Blocks, WeightFormat
from gossamer.spec.errors import bad_input

_LEAST, _MOST = 2, 8  # bits
_TOGETHER = 8  # codes that fill whole bytes at any number of bits


@dataclass(frozen=True)
class Packed(WeightFormat):
    """The format of codes of `bits` bits in groups of `group` weights (0: a group is a row)."""

    bits: int = 4
    group: int = 64
    symmetric: bool = False

    def __post_init__(self) -> None:
        if not _LEAST <= self.bits <= _MOST:
            raise bad_input(wanted="2 to 8 bits", got=str(self.bits), do="choose one of 2, 3, 4, 8", key="bits")
        if self.group < 0 or self.group % _TOGETHER:
            raise bad_input(
                wanted=f"groups of a multiple of {_TOGETHER} weights, or 0 for a row each",
                got=str(self.group),
                do="choose 32, 64 or 128",
                key="group",
            )

    def width(self, columns: int) -> int:
        """Return the weights in a group of a row of `columns`."""
        return self.group or -(-columns // _TOGETHER) * _TOGETHER

    def groups(self, columns: int) -> int:
        """Return the groups in a row of `columns`."""
        return -(-columns // self.width(columns))

    def empty(self, rows: int, columns: int, device: torch.device | None = None) -> Blocks:
        groups = self.groups(columns)
        row_bytes = groups * self.width(columns) * self.bits // 8
        codes = torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
        return Blocks(codes, torch.empty(rows, groups, self._scales, dtype=torch.float16, device=device))

    def encode(self, weight: Tensor) -> Blocks:
        """Round every weight to the nearest value of its group's grid."""
        wide = self._in_groups(weight.detach().float())
        scales = self.grid(wide)
        codes = self.nearest(wide, scales.unsqueeze(-2)).flatten(1)
        return self.pack(codes[:, : weight.shape[1]], scales)

    def decode(self, blocks: Blocks, columns: int) -> Tensor:
        assert blocks.scales is not None
        groups = blocks.scales.shape[1]
        codes = self.codes(blocks).reshape(len(blocks.codes), groups, -1)
        return self.values(codes, blocks.scales.unsqueeze(-2)).flatten(1)[:, :columns]

    def grid(self, wide: Tensor) -> Tensor:
        """Return the scales (..., 1 or 2) in float16 of groups of weights (..., weights of a group) in float32."""
        if self.symmetric:
            return _at_least(wide.abs().amax(-1) / (self._zero - 1)).unsqueeze(-1)
        least = -_at_least(-wide.amin(-1))
        steps = _at_least((wide.amax(-1) - least.float()) / self._top)
        return torch.stack((steps, least), -1)

    def nearest(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the codes (uint8) nearest to values (...) on the grids `scales` (..., 1 or 2)."""
        step = scales[..., 0].float()
        if self.symmetric:
            most = self._zero - 1
            signed = torch.where(step > 0, values / step, 0).round_().clamp_(-most, most)
            return signed.add_(self._zero).to(torch.uint8)
        above = values - scales[..., 1].float()
        return torch.where(step > 0, above / step, 0).round_().clamp_(0, self._top).to(torch.uint8)

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the weights in float32 that codes (...) on the grids `scales` (..., 1 or 2) stand for."""
        step = scales[..., 0].float()
        if self.symmetric:
            return codes.float().sub_(self._zero).mul_(step)
        return codes.float().mul_(step).add_(scales[..., 1].float())

    def pack(self, codes: Tensor, scales: Tensor) -> Blocks:
        """Return blocks of codes (rows, columns), one a byte, on grids (rows, groups, 1 or 2); zeros fill the last."""
        missing = -codes.shape[1] % self.width(codes.shape[1])
        if missing:
            codes = nn.functional.pad(codes, (0, missing))
        if self.bits == 8:
            return Blocks(codes.contiguous(), scales)
        eights = codes.reshape(len(codes), -1, _TOGETHER).long()
        stream = (eights << self._shifts(codes.device)).sum(-1, keepdim=True)
        return Blocks(_bytes_of(stream)[..., : self.bits].flatten(1).contiguous(), scales)

    def codes(self, blocks: Blocks) -> Tensor:
        """Return the codes (rows, columns of whole groups) of blocks, one a byte."""
        if self.bits == 8:
            return blocks.codes
        if 8 % self.bits == 0:  # no code lies in two bytes
            shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=blocks.codes.device)
            return ((blocks.codes.unsqueeze(-1) >> shifts) & self._top).flatten(1)
        parts = blocks.codes.reshape(len(blocks.codes), -1, self.bits).long()
        places = torch.arange(0, 8 * self.bits, 8, device=blocks.codes.device)
        stream = (parts << places).sum(-1, keepdim=True)
        return ((stream >> self._shifts(blocks.codes.device)) & self._top).to(torch.uint8).flatten(1)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def _zero(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _scales(self) -> int:
        return 1 if self.symmetric else 2

    def _shifts(self, device: torch.device) -> Tensor:
        return torch.arange(0, _TOGETHER * self.bits, self.bits, device=device)

    def _in_groups(self, weight: Tensor) -> Tensor:
        """Return (rows, columns) as (rows, groups, weights). A shorter last group repeats its row's last weight,

        which changes neither the smallest nor the largest of the group.
        """
        width = self.width(weight.shape[1])
        missing = -weight.shape[1] % width
        if missing:
            weight = nn.functional.pad(weight, (0, missing), mode="replicate")
        return weight.reshape(weight.shape[0], -1, width)


def _bytes_of(stream: Tensor) -> Tensor:
    """Return (..., 1) int64 as its eight bytes (..., 8), the lowest first."""
    places = torch.arange(0, 64, 8, device=stream.device)
    return ((stream >> places) & 255).to(torch.uint8)


def _at_least(values: Tensor) -> Tensor:
    """Return the smallest float16 numbers that are no smaller than `values` in float32."""
    rounded = values.half()
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < values, above, rounded)
