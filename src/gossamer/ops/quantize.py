"""Block quantization: numbers to small integers with one scale per block of neighbors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from gossamer.ops import bits as small
from gossamer.ops.blocks import BlockSpans, as_rows, scratch, spans
from gossamer.ops.rounding_noise import Noise

SMALLEST = 1e-36  # a block whose largest magnitude is below it is sent as zeros: its scale would lose its precision


def quantize(
    x: Tensor,
    block: int,
    levels: int,
    scales: Tensor,
    out: Tensor,
    generator: torch.Generator | None = None,
    bits: int = 8,
    lost: Tensor | None = None,
) -> None:
    """Quantize x (..., numel) float32 to integers in [-levels, levels] in `out`, with one scale per block in `scales`.

    `scales` (..., ceil(numel / block)) gets the size of one integer step. `out` is (..., numel) int8; with fewer bits
    (..., ceil(numel bits / 8)) uint8, and the block a multiple of 8. Rounds to nearest, or with a `generator`
    stochastically, so that the mean is unbiased. A block with a non-finite number gets a non-finite scale. The rounding
    error of x is written to `lost`, which may be x.
    """
    rows, room = as_rows(x), scratch(x, block)
    rest = None if lost is None else as_rows(lost)
    scales, out = as_rows(scales), as_rows(out)
    noise = None if generator is None else _Shake(room, generator)
    codes = scratch(x, block, torch.int8) if bits < 8 else None
    # The divisor is on the device of x: torch multiplies numbers on a GPU by the inverse of one on the CPU, which may
    # be a bit off. Ranks with and without a GPU would send other bytes for the same numbers.
    level, divisor = number(levels), torch.full((), levels, dtype=torch.float32, device=x.device)
    smallest = number(SMALLEST)
    for cut in spans(rows, block):
        written = cut.numbers(out) if codes is None else cut.packed(out, bits)
        narrow = written if codes is None else cut.scratch(codes)
        losses = cut.numbers(rows if rest is None else rest)
        views = zip(cut.numbers(rows), cut.blocks(scales), cut.scratch(room), narrow, written, losses, strict=True)
        for values, scale, steps, code, target, loss in views:
            _steps(values, steps, level, divisor, smallest, scale, noise)
            code.copy_(steps)
            if codes is not None:
                target.copy_(_packed(code, bits))
            if rest is not None:
                # Rounded once on every device: on some, a factor beside the product rounds that first.
                torch.addcmul(values, steps, scale.neg().unsqueeze(-1), out=loss)


def dequantize(levels: Tensor, scales: Tensor, block: int, bits: int = 8, numel: int | None = None) -> Tensor:
    """Return the integers of `quantize` times the scale of their block, as a new (..., numel) float32."""
    numel = levels.shape[-1] if numel is None else numel
    out = torch.empty((*levels.shape[:-1], numel), dtype=torch.float32, device=levels.device)
    levels, scales, rows = as_rows(levels), as_rows(scales).unsqueeze(-1), as_rows(out)
    room = scratch(out, block, torch.int8) if bits < 8 else None
    for cut in spans(rows, block):
        views = zip(_codes(levels, cut, bits, room), cut.blocks(scales), cut.numbers(rows), strict=True)
        for codes, scale, target in views:
            target.copy_(codes)
            target.mul_(scale)
    return out


def add_dequantized(total: Tensor, levels: Tensor, scales: Tensor, block: int, bits: int = 8) -> None:
    """Add the result of `dequantize` to `total` (..., numel) float32, in place."""
    levels, scales, rows, steps = as_rows(levels), as_rows(scales).unsqueeze(-1), as_rows(total), scratch(total, block)
    room = scratch(total, block, torch.int8) if bits < 8 else None
    for cut in spans(rows, block):
        integers = zip(_codes(levels, cut, bits, room), cut.scratch(steps), strict=True)
        for (codes, here), scale, target in zip(integers, cut.blocks(scales), cut.numbers(rows), strict=True):
            target.addcmul_(here.copy_(codes), scale)


def encode_signs(x: Tensor, scales: Tensor, out: Tensor, block: int, lost: Tensor | None = None) -> None:
    """Write one bit for each of x (..., numel) float32 to `out` (..., ceil(numel / 8)) uint8: whether it is below zero.

    `scales` (..., ceil(numel / block)) gets the mean magnitude of each block; x less what `dequantize` gives with it is
    written to `lost`, which may be x.
    """
    rows, room, means, codes = as_rows(x), scratch(x, block), as_rows(scales), as_rows(out)
    for cut in spans(rows, block):
        views = zip(cut.numbers(rows), cut.scratch(room), cut.blocks(means), cut.packed(codes, 1), strict=True)
        for values, here, mean, target in views:
            _mean_magnitude(values, here, mean)
            target.copy_(_signs(values.flatten(1)))  # while the numbers are in the cache
    if lost is not None:
        torch.sub(x, dequantize(out, scales, block, bits=1, numel=x.shape[-1]), out=lost)


def mean_magnitudes(x: Tensor, out: Tensor, block: int) -> None:
    """Write the mean magnitude of each block of x (..., numel) float32 to `out` (..., ceil(numel / block))."""
    rows, room, means = as_rows(x), scratch(x, block), as_rows(out)
    for cut in spans(rows, block):
        for values, here, mean in zip(cut.numbers(rows), cut.scratch(room), cut.blocks(means), strict=True):
            _mean_magnitude(values, here, mean)


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block of values (..., blocks, width), NaN where one is, as (..., blocks)."""
    # Two passes that only read. The largest of `abs` writes a third one, `aminmax` and the vector norm take ten times
    # as long along a dimension. Of two dimensions they take 0.8 of the time of three.
    flat = values[0] if values.shape[0] == 1 else values
    most = torch.maximum(flat.amax(-1), flat.amin(-1).neg_()).abs_()
    return most if flat is values else most.unsqueeze(0)


def inverse(of: Tensor, times: Tensor, small: Tensor) -> Tensor:
    """Return times / of, both float32, and zero where `small` is true: what brings a number to units of `of`."""
    return of.reciprocal().mul_(times).masked_fill_(small, 0.0)


def number(value: float) -> Tensor:
    """Return () float32 on the CPU: as operand of short tensors, of any device, three times faster than a float."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


class _Shake:
    """Noise for stochastic rounding: odd multiples of 2^-16 in (-1/2, 1/2) with mean zero, added before rounding."""

    def __init__(self, room: Tensor, generator: torch.Generator) -> None:
        self._noise = Noise(-(-room.numel() // 2), generator, room.device)
        self._room = torch.empty_like(room)

    def add_to(self, steps: Tensor) -> None:
        words = self._noise.words(-(-steps.numel() // 2))
        words |= 0x00010001
        here = self._room[: steps.numel()].copy_(words.view(torch.int16)[: steps.numel()])
        steps.add_(here.view(steps.shape), alpha=2.0**-16)


def _steps(
    values: Tensor,
    steps: Tensor,
    level: Tensor,
    divisor: Tensor,
    smallest: Tensor,
    scale: Tensor,
    noise: _Shake | None,
) -> None:
    top = largest(values)
    if noise is not None:
        # So that no noise can round the largest number beyond the last level, where it would change its sign: its
        # product with the inverse may be some bits more than `levels`. A block that reaches the last float32 becomes
        # infinite by it.
        top *= 1 + 2.0**-22
    torch.div(top, divisor, out=scale)
    torch.mul(values, inverse(top, level, top < smallest).unsqueeze(-1), out=steps)
    if noise is not None:
        noise.add_to(steps)
    steps.round_()


def _mean_magnitude(values: Tensor, room: Tensor, out: Tensor) -> None:
    torch.mean(torch.abs(values, out=room), -1, out=out)


def _signs(values: Tensor) -> Tensor:
    """Return whether each of values (rows, n) is below zero, as (rows, ceil(n / 8)) uint8."""
    if values.device.type == "cpu":  # numpy packs bits twice as fast as any way through torch
        return torch.from_numpy(np.packbits(np.less(values.numpy(), 0), axis=-1, bitorder="little"))
    below = (values < 0).contiguous()
    return small.pack(torch.nn.functional.pad(below, (0, -below.shape[-1] % 8)).view(torch.int8), 1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    rows, numel = codes.shape[0], codes.shape[1] * codes.shape[2]
    odd = -numel % 8
    flat = codes.view(rows, numel)
    return small.pack(torch.nn.functional.pad(flat, (0, odd)) if odd else flat, bits)[:, : -(-numel * bits // 8)]


def _codes(levels: Tensor, cut: BlockSpans, bits: int, room: Tensor | None) -> Iterable[Tensor]:
    """Return the integers of every span, (rows, blocks, width) int8; those in fewer bits are unpacked into `room`."""
    if room is None:
        return cut.numbers(levels)
    packed = zip(cut.packed(levels, bits), cut.scratch(room), strict=True)
    return (_unpacked(bytes_, bits, here, room) for bytes_, here in packed)


def _unpacked(packed: Tensor, bits: int, here: Tensor, room: Tensor) -> Tensor:
    if packed.numel() * 8 == here.numel() * bits:
        small.unpack(packed, bits, here)
        return here
    rows, blocks, width = here.shape  # the short block at the end has some bits too many
    padded = packed.shape[1] * 8 // bits
    wide = room[: rows * padded] if rows * padded <= room.numel() else room.new_empty(rows * padded)
    small.unpack(packed, bits, wide)
    return wide.view(rows, padded)[:, : blocks * width].reshape(rows, blocks, width)
