"""Codecs as Triton kernels: one reading and one writing of memory, where torch takes five passes and some scratch.

Every function has the arguments and the results of the passes that it stands for (`ops.quantize`, `ops.low_precision`),
bit for bit, but that NaN is NaN whatever its other bits are. What makes that possible:
- The largest magnitude of a block does not depend on the order; it is found on the bits, as integers, where NaN is the
  largest of all. (A mean does depend on it, so the scales of `sign` are left to torch.)
- Division is that of IEEE 754, a product is never fused with a sum by the compiler, and where torch does so it is asked
  for (`fma`). Rounding to integers adds and takes off 2^23, and keeps the sign of zero.
- Random rounding takes the words that `Noise` draws, by the same calls in the same order.
Work: the bytes of the numbers and of the message, once.   Unlike the passes: no scratch, no wait for the device.
This module imports triton; `ops.fused` imports it, and nobody else does. The kernels are in `ops.triton_kernels`.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from gossamer.ops import triton_kernels as kernels
from gossamer.ops.blocks import as_rows, dense_rows, span_size, spans
from gossamer.ops.quantize import SMALLEST, mean_magnitudes
from gossamer.ops.rounding_noise import Noise

_TILE = 4096  # numbers of a program, where blocks are shorter: at least as many as it has threads
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}


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
    """Do what `ops.quantize.quantize` does, for blocks that one program can hold."""
    rows, scales, out = dense_rows(x), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return
    rest = rows if lost is None else as_rows(lost)
    pool, pairs, places = (scales, scales, (1,) * 7) if generator is None else _noise(rows, block, generator)
    width, group = _shape(block)
    groups = triton.cdiv(scales.shape[1], group)
    with _device(x):
        kernels.quantize[(count * groups,)](
            *(rows, scales, out, rest, pool, pairs),
            *(numel, groups, rows.stride(0), scales.stride(0), out.stride(0), rest.stride(0), *places),
            *(float(levels), SMALLEST),
            BLOCK=block,
            WIDTH=width,
            GROUP=group,
            BITS=bits,
            LOSES=lost is not None,
            NOISE=generator is not None,
            ALIGNED=_aligned(numel, rows, rest, out),
            **_LAUNCH,
        )


def dequantize(levels: Tensor, scales: Tensor, block: int, bits: int = 8, numel: int | None = None) -> Tensor:
    """Do what `ops.quantize.dequantize` does."""
    numel = levels.shape[-1] if numel is None else numel
    out = torch.empty((*levels.shape[:-1], numel), dtype=torch.float32, device=levels.device)
    _dequantized(out, levels, scales, block, bits, adds=False)
    return out


def add_dequantized(total: Tensor, levels: Tensor, scales: Tensor, block: int, bits: int = 8) -> None:
    """Do what `ops.quantize.add_dequantized` does."""
    _dequantized(total, levels, scales, block, bits, adds=True)


def narrow(x: Tensor, block: int, top: int, scales: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
    """Do what `ops.low_precision.narrow` does to float16, for blocks that one program can hold."""
    rows, scales, out = dense_rows(x), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return
    rest = rows if lost is None else as_rows(lost)
    width, group = _shape(block)
    groups = triton.cdiv(scales.shape[1], group)
    with _device(x):
        kernels.narrow[(count * groups,)](
            *(rows, scales, out, rest),
            *(numel, groups, rows.stride(0), scales.stride(0), out.stride(0), rest.stride(0)),
            *(2.0**top, 2.0**-top, 2.0 ** (top - 127), SMALLEST, torch.finfo(torch.float32).max),
            BLOCK=block,
            WIDTH=width,
            GROUP=group,
            LOSES=lost is not None,
            ALIGNED=_aligned(numel, rows, rest, out),
            **_LAUNCH,
        )


def widen(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Do what `ops.low_precision.widen` does, for float16."""
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    rows, scales, target = dense_rows(values), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return out
    tiles = triton.cdiv(numel, _TILE)
    with _device(out):
        kernels.widen[(count * tiles,)](
            *(rows, scales, target, numel, tiles, rows.stride(0), scales.stride(0), target.stride(0)),
            torch.finfo(torch.float32).max,
            BLOCK=block,
            TILE=_TILE,
            ALIGNED=_aligned(numel, rows, target),
            **_LAUNCH,
        )
    return out


def bfloat16_losing(x: Tensor, out: Tensor, lost: Tensor) -> None:
    """Do what `ops.low_precision.bfloat16_losing` does."""
    rows, coded, rest = dense_rows(x), as_rows(out), as_rows(lost)
    count, numel = rows.shape
    if not rows.numel():
        return
    tiles = triton.cdiv(numel, _TILE)
    with _device(x):
        kernels.bfloat16_losing[(count * tiles,)](
            *(rows, coded.view(torch.int16), rest, numel, tiles, rows.stride(0), coded.stride(0), rest.stride(0)),
            TILE=_TILE,
            ALIGNED=_aligned(numel, rows, coded, rest),
            **_LAUNCH,
        )


def encode_signs(x: Tensor, scales: Tensor, out: Tensor, block: int, lost: Tensor | None = None) -> None:
    """Do what `ops.quantize.encode_signs` does."""
    mean_magnitudes(x, scales, block)
    rows, scales, out = dense_rows(x), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return
    rest = rows if lost is None else as_rows(lost)
    tiles = triton.cdiv(numel, _TILE)
    with _device(x):
        kernels.pack_signs[(count * tiles,)](
            *(rows, scales, out, rest, numel, tiles),
            *(rows.stride(0), scales.stride(0), out.stride(0), rest.stride(0)),
            BLOCK=block,
            TILE=_TILE,
            LOSES=lost is not None,
            ALIGNED=_aligned(numel, rows, rest, out),
            **_LAUNCH,
        )


def _dequantized(out: Tensor, levels: Tensor, scales: Tensor, block: int, bits: int, *, adds: bool) -> None:
    levels, scales, rows = as_rows(levels), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return
    tiles = triton.cdiv(numel, _TILE)
    with _device(out):
        kernels.dequantize[(count * tiles,)](
            *(levels, scales, rows, numel, tiles, levels.stride(0), scales.stride(0), rows.stride(0)),
            BLOCK=block,
            TILE=_TILE,
            BITS=bits,
            ADDS=adds,
            ALIGNED=_aligned(numel, rows, levels),
            **_LAUNCH,
        )


def _shape(block: int) -> tuple[int, int]:
    """Return the width of a block's row in a program's tile, a power of two, and the blocks of a program."""
    width = triton.next_power_of_2(block)
    return width, max(1, _TILE // width)


def _aligned(numel: int, *tensors: Tensor) -> bool:
    """Return whether every row is whole vectors, so that threads move 16 bytes at a time."""
    return numel % 16 == 0 and all(len(t) == 1 or t.stride(0) % 16 == 0 for t in tensors)


def _device(t: Tensor) -> AbstractContextManager[object]:
    """Launch on the device of t: a thread of ours may have another one as its current device."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def _noise(rows: Tensor, block: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Draw what the passes of `quantize` draw, and return the pool, the pair of every span, and how spans lie.

    The last are: numbers in whole blocks; of these and of the short block at the end rows per span and numbers of a row
    per span; spans of whole blocks side by side in a row, and all of them.
    """
    noise = Noise(-(-span_size(rows, block) // 2), generator, rows.device)
    whole, several, step, beside, of_whole, several_end, step_end = 0, 1, 1, 1, 0, 1, 1
    count = 0
    for cut in spans(rows, block):
        per_row = -(-(cut.stop - cut.start) // cut.step)
        here = -(-cut.rows // cut.several) * per_row
        count += here
        if cut.start == 0 and cut.width == block:
            whole, several, step, beside, of_whole = cut.stop, cut.several, cut.step, per_row, here
        else:
            several_end, step_end = cut.several, cut.step
    pool, pairs = noise.pool, noise.pairs(count)
    return pool, pairs, (whole, several, step, beside, of_whole, several_end, step_end)
