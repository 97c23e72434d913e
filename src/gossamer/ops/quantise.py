"""Block quantisation: numbers to small integers with one scale per block of neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SMALLEST = 1e-36  # a block whose largest magnitude is below it is sent as zeros: its scale would lose its precision
_CHUNK = 1 << 18  # numbers worked on at a time: they stay in the cache between passes, and calls stay rare


def quantise(
    x: Tensor, block: int, levels: int, scales: Tensor, out: Tensor, generator: torch.Generator | None = None
) -> None:
    """Write x (..., numel) float32 as integers in [-levels, levels] to `out` (..., numel) int8, and the size of one
    integer step to `scales` (..., ceil(numel / block)). Rounds to nearest, or up or down at random so that the mean is
    right. A block with a number that is not finite gets a scale that is not finite.
    """
    for values, scale, target in _blocks(x, block, scales, out):
        largest = values.abs().amax(-1)  # five times faster than the vector norm, and as careful about NaN
        torch.div(largest, levels, out=scale)
        inverse = torch.where(largest < SMALLEST, torch.zeros_like(largest), levels / largest)
        steps = values * inverse.unsqueeze(-1)
        if generator is None:
            target.copy_(steps.round_())
        else:
            target.copy_(steps.add_(_noise(steps, generator)).floor_().clamp_(-levels, levels))


def dequantise(levels: Tensor, scales: Tensor, block: int) -> Tensor:
    """levels (..., numel) int8 times the scale of its block, as a new (..., numel) float32."""
    out = torch.empty(levels.shape, dtype=torch.float32, device=levels.device)
    for values, scale, target in _blocks(levels, block, scales, out):
        torch.mul(values, scale.unsqueeze(-1), out=target)
    return out


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [0, 1) with 16 random bits each: four times cheaper than float32 random numbers."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int16)[: like.numel()].view(like.shape)
    return bits.float().add_(32768.5).mul_(2.0**-16)


def _blocks(x: Tensor, block: int, scales: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(blocks, their scales, where their results go), some blocks at a time: whole ones of a row, then its rest."""
    numel = x.shape[-1]
    whole, step = numel // block * block, max(block, _CHUNK // block * block)
    for row, scale, target in zip(_rows(x), _rows(scales), _rows(out), strict=True):
        for start in range(0, whole, step):
            here = slice(start, min(whole, start + step))
            yield (
                row[here].view(-1, block),
                scale[here.start // block : here.stop // block],
                target[here].view(-1, block),
            )
        if whole < numel:
            yield row[whole:].view(1, -1), scale[-1:], target[whole:].view(1, -1)


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
