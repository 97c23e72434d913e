"""Block quantization: numbers to small integers with one scale per block of neighbors."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.ops import bits as small
from gossamer.ops.blocks import Span, as_rows, scratch, spans
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
    for span in spans(rows, block):
        values, scale = span.numbers(rows), span.blocks(scales)
        steps = _steps(values, span.scratch(room), levels, scale, noise)
        if codes is None:
            span.numbers(out).copy_(steps)
        else:
            span.packed(out, bits).copy_(_packed(span.scratch(codes).copy_(steps), bits))
        if rest is not None:
            torch.addcmul(values, steps, scale.unsqueeze(-1), value=-1, out=span.numbers(rest))


def dequantize(levels: Tensor, scales: Tensor, block: int, bits: int = 8, numel: int | None = None) -> Tensor:
    """Return the integers of `quantize` times the scale of their block, as a new (..., numel) float32."""
    numel = levels.shape[-1] if numel is None else numel
    out = torch.empty((*levels.shape[:-1], numel), dtype=torch.float32, device=levels.device)
    levels, scales, rows = as_rows(levels), as_rows(scales), as_rows(out)
    codes = scratch(out, block, torch.int8) if bits < 8 else None
    for span in spans(rows, block):
        target = span.numbers(rows).copy_(_steps_of(levels, span, bits, codes))
        target.mul_(span.blocks(scales).unsqueeze(-1))
    return out


def add_dequantized(total: Tensor, levels: Tensor, scales: Tensor, block: int, bits: int = 8) -> None:
    """Add the result of `dequantize` to `total` (..., numel) float32, in place."""
    levels, scales, rows, room = as_rows(levels), as_rows(scales), as_rows(total), scratch(total, block)
    codes = scratch(total, block, torch.int8) if bits < 8 else None
    for span in spans(rows, block):
        steps = span.scratch(room).copy_(_steps_of(levels, span, bits, codes))
        span.numbers(rows).addcmul_(steps, span.blocks(scales).unsqueeze(-1))


def largest(values: Tensor, room: Tensor) -> Tensor:
    """Return the largest magnitude of each block of values (..., blocks, width), NaN where one is, as (..., blocks)."""
    return torch.abs(values, out=room).amax(-1)  # five times faster than the vector norm, and as careful about NaN


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


def _steps(values: Tensor, room: Tensor, levels: int, scale: Tensor, noise: _Shake | None) -> Tensor:
    top = largest(values, room)
    if noise is not None:
        # So that no noise can round the largest number beyond the last level, where it would change its sign: its
        # product with the inverse may be some bits more than `levels`. A block that reaches the last float32 becomes
        # infinite by it.
        top *= 1 + 2.0**-22
    torch.div(top, levels, out=scale)
    inverse = torch.where(top < SMALLEST, torch.zeros_like(top), levels / top)
    steps = torch.mul(values, inverse.unsqueeze(-1), out=room)
    if noise is not None:
        noise.add_to(steps)
    return steps.round_()


def _packed(codes: Tensor, bits: int) -> Tensor:
    rows, numel = codes.shape[0], codes.shape[1] * codes.shape[2]
    odd = -numel % 8
    flat = codes.view(rows, numel)
    return small.pack(torch.nn.functional.pad(flat, (0, odd)) if odd else flat, bits)[:, : -(-numel * bits // 8)]


def _steps_of(levels: Tensor, span: Span, bits: int, codes: Tensor | None) -> Tensor:
    """Return the integers of one span, (rows, blocks, width) int8; those in fewer bits are unpacked into `codes`."""
    return span.numbers(levels) if codes is None else _unpacked(span.packed(levels, bits), bits, span, codes)


def _unpacked(packed: Tensor, bits: int, span: Span, codes: Tensor) -> Tensor:
    rows, numel, size = packed.shape[0], span.stop - span.start, 8 // bits
    padded = packed.shape[1] * size
    here = codes[: rows * padded] if rows * padded <= codes.numel() else codes.new_empty(rows * padded)
    small.unpack(packed, bits, here)
    return here.view(rows, padded)[:, :numel].reshape(rows, -1, span.width)
