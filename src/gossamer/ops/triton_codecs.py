"""Codecs as Triton kernels: one reading and one writing of memory, where torch takes five passes and some scratch.

Every function has the arguments and the results of the passes that it stands for (`ops.quantize`, `ops.low_precision`),
bit for bit, but that NaN is NaN whatever its other bits are. What makes that possible:
- The largest magnitude of a block does not depend on the order; it is found on the bits, as integers, where NaN is the
  largest of all. (A mean does depend on it, so the scales of `sign` are left to torch.)
- Division is that of IEEE 754, a product is never fused with a sum by the compiler, and where torch does so it is asked
  for (`fma`). Rounding to integers adds and takes off 2^23, and keeps the sign of zero.
- Random rounding takes the words that `Noise` draws, by the same calls in the same order.
Work: the bytes of the numbers and of the message, once.   Unlike the passes: no scratch, no wait for the device.
This module imports triton; `ops.fused` imports it, and nobody else does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# What a kernel is given has the types of its launch; annotations would change what triton compiles.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.ops.blocks import as_rows, span_size, spans
from gossamer.ops.quantize import SMALLEST
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
    rows, scales, out = _dense(x), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return
    rest = rows if lost is None else as_rows(lost)
    pool, pairs, places = (scales, scales, (1,) * 7) if generator is None else _noise(rows, block, generator)
    width, group = _shape(block)
    groups = triton.cdiv(scales.shape[1], group)
    with _device(x):
        _quantize[(count * groups,)](
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
    rows, scales, out = _dense(x), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return
    rest = rows if lost is None else as_rows(lost)
    width, group = _shape(block)
    groups = triton.cdiv(scales.shape[1], group)
    with _device(x):
        _narrow[(count * groups,)](
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
    rows, scales, target = _dense(values), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return out
    tiles = triton.cdiv(numel, _TILE)
    with _device(out):
        _widen[(count * tiles,)](
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
    rows, coded, rest = _dense(x), as_rows(out), as_rows(lost)
    count, numel = rows.shape
    if not rows.numel():
        return
    tiles = triton.cdiv(numel, _TILE)
    with _device(x):
        _bfloat16[(count * tiles,)](
            *(rows, coded.view(torch.int16), rest, numel, tiles, rows.stride(0), coded.stride(0), rest.stride(0)),
            TILE=_TILE,
            ALIGNED=_aligned(numel, rows, coded, rest),
            **_LAUNCH,
        )


def pack_signs(x: Tensor, scales: Tensor, out: Tensor, block: int, lost: Tensor | None = None) -> None:
    """Do what `ops.quantize.pack_signs` does."""
    rows, scales, out = _dense(x), as_rows(scales), as_rows(out)
    count, numel = rows.shape
    if not rows.numel():
        return
    rest = rows if lost is None else as_rows(lost)
    tiles = triton.cdiv(numel, _TILE)
    with _device(x):
        _signs[(count * tiles,)](
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
        _dequantize[(count * tiles,)](
            *(levels, scales, rows, numel, tiles, levels.stride(0), scales.stride(0), rows.stride(0)),
            BLOCK=block,
            TILE=_TILE,
            BITS=bits,
            ADDS=adds,
            ALIGNED=_aligned(numel, rows, levels),
            **_LAUNCH,
        )


def _dense(t: Tensor) -> Tensor:
    """Return t as (rows, numel) with neighbors side by side; a copy where they are not."""
    rows = as_rows(t)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


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


_INTEGERS = ["numel", "groups", "tiles", "x_row", "scale_row", "out_row", "lost_row", "code_row"]
_SPANS = ["whole", "several", "step", "beside", "of_whole", "several_end", "step_end"]
_NUMBERS = ["level", "smallest", "up", "down", "least", "most_float"]


@triton.jit
def _magnitude_bits(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(v):
    """Round to nearest, ties to even, below 2^22; the sign of zero stays."""
    size = _magnitude_bits(v).to(tl.float32, bitcast=True)
    near = (size + 8388608.0) - 8388608.0
    sign = v.to(tl.int32, bitcast=True) & -2147483648
    return (near.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _shaken(steps, row, n, pool, pairs, whole, several, step, beside, of_whole, several_end, step_end):
    """Add the noise of number n of a row. It lies in a span as in `BlockSpans`: one of several rows has all of them."""
    is_whole = n < whole
    span = tl.where(is_whole, row // several * beside + n // step, of_whole + row // several_end)
    index = tl.where(is_whole, row % several * step + n % step, row % several_end * step_end + n - whole)
    factor = tl.load(pairs + 2 * span) | 1
    shift = tl.load(pairs + 2 * span + 1)
    word = (tl.load(pool + index // 2) * factor + shift) | 0x00010001
    low = (word << 16) >> 16
    noise = tl.where(index % 2 == 0, low, word >> 16)
    return steps + noise.to(tl.float32) * 0.0000152587890625  # 2^-16


@triton.jit(do_not_specialize=[*_INTEGERS[:2], *_INTEGERS[3:7], *_SPANS, *_NUMBERS[:2]])
def _quantize(
    x,
    scales,
    out,
    lost,
    pool,
    pairs,
    numel,
    groups,
    x_row,
    scale_row,
    out_row,
    lost_row,
    whole,
    several,
    step,
    beside,
    of_whole,
    several_end,
    step_end,
    level,
    smallest,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    LOSES: tl.constexpr,
    NOISE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if ALIGNED:
        numel = numel // 16 * 16
        x_row = x_row // 16 * 16
        out_row = out_row // 16 * 16
        lost_row = lost_row // 16 * 16
    row = (tl.program_id(0) // groups).to(tl.int64)
    blocks = (tl.program_id(0) % groups).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, WIDTH)
    n = blocks[:, None] * BLOCK + column[None, :]
    inside = (column[None, :] < BLOCK) & (n < numel)
    v = tl.load(x + row * x_row + n, mask=inside, other=0.0)
    top = tl.max(_magnitude_bits(v), axis=1).to(tl.float32, bitcast=True)
    if NOISE:
        top = top * 1.0000002384185791015625  # 1 + 2^-22
    scale = tl.div_rn(top, level)
    tl.store(scales + row * scale_row + blocks, scale, mask=blocks * BLOCK < numel)
    factor = tl.where(top < smallest, 0.0, tl.div_rn(1.0, top) * level)
    steps = v * factor[:, None]
    if NOISE:
        # what is outside reads the first word, and is not written
        word = tl.where(inside, n, 0)
        steps = _shaken(steps, row, word, pool, pairs, whole, several, step, beside, of_whole, several_end, step_end)
    steps = _rounded(steps)
    code = tl.where(inside & (steps == steps), steps, 0.0).to(tl.int8)
    if LOSES:
        tl.debug_barrier()  # `lost` may be x
        down = scale[:, None] * -1.0  # minus is 0 - x in older versions: no -0
        tl.store(lost + row * lost_row + n, tl.fma(steps, down, v), mask=inside)
    if BITS == 8:
        tl.store(out + row * out_row + n, code, mask=inside)
    else:
        each: tl.constexpr = 8 // BITS
        fields = tl.reshape(code.to(tl.int32) & ((1 << BITS) - 1), (GROUP, WIDTH // each, each))
        bytes_ = tl.sum(fields << (tl.arange(0, each) * BITS)[None, None, :], axis=2)
        place = tl.arange(0, WIDTH // each)[None, :]
        to = blocks[:, None] * (BLOCK // each) + place
        tl.store(out + row * out_row + to, bytes_.to(tl.uint8), mask=(place < BLOCK // each) & (to * each < numel))


@triton.jit(do_not_specialize=["numel", "tiles", "code_row", "scale_row", "out_row"])
def _dequantize(
    codes,
    scales,
    out,
    numel,
    tiles,
    code_row,
    scale_row,
    out_row,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if ALIGNED:
        numel = numel // 16 * 16
        code_row = code_row // 16 * 16
        out_row = out_row // 16 * 16
    row = (tl.program_id(0) // tiles).to(tl.int64)
    n = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = n < numel
    if BITS == 8:
        step = tl.load(codes + row * code_row + n, mask=inside, other=0).to(tl.float32)
    else:
        each: tl.constexpr = 8 // BITS
        byte = tl.load(codes + row * code_row + n // each, mask=inside, other=0).to(tl.int32)
        field = (byte >> ((n % each) * BITS).to(tl.int32)) & ((1 << BITS) - 1)
        whole = 1 - 2 * field if BITS == 1 else field - ((field >> (BITS - 1)) << BITS)
        step = whole.to(tl.float32)
    scale = tl.load(scales + row * scale_row + n // BLOCK, mask=inside, other=0.0)
    target = out + row * out_row + n
    if ADDS:
        tl.store(target, tl.fma(step, scale, tl.load(target, mask=inside, other=0.0)), mask=inside)
    else:
        tl.store(target, step * scale, mask=inside)


@triton.jit
def _wide(half, scale, most_float):
    """float16 times its block's power of two; what rounding made larger than any float32 is the largest one."""
    product = half.to(tl.float32) * scale
    held = tl.where(product > most_float, most_float, tl.where(product < -most_float, -most_float, product))
    return tl.where(scale < float("inf"), held, product)


@triton.jit(
    do_not_specialize=[
        *("numel", "groups", "x_row", "scale_row", "out_row", "lost_row"),
        *("up", "down", "least", "smallest", "most_float"),
    ]
)
def _narrow(
    x,
    scales,
    out,
    lost,
    numel,
    groups,
    x_row,
    scale_row,
    out_row,
    lost_row,
    up,
    down,
    least,
    smallest,
    most_float,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    LOSES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if ALIGNED:
        numel = numel // 16 * 16
        x_row = x_row // 16 * 16
        out_row = out_row // 16 * 16
        lost_row = lost_row // 16 * 16
    row = (tl.program_id(0) // groups).to(tl.int64)
    blocks = (tl.program_id(0) % groups).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, WIDTH)
    n = blocks[:, None] * BLOCK + column[None, :]
    inside = (column[None, :] < BLOCK) & (n < numel)
    v = tl.load(x + row * x_row + n, mask=inside, other=0.0)
    most = tl.max(_magnitude_bits(v), axis=1)
    power = (most & 0x7F800000).to(tl.float32, bitcast=True)  # infinite for NaN
    small = most.to(tl.float32, bitcast=True) < smallest
    power = tl.where(small | (power > least), power, least)
    scale = power * down
    tl.store(scales + row * scale_row + blocks, scale, mask=blocks * BLOCK < numel)
    factor = tl.where(small, 0.0, tl.div_rn(1.0, power) * up)
    factor = tl.where(power == float("inf"), 1.0, factor)
    half = (v * factor[:, None]).to(tl.float16)
    if LOSES:
        tl.debug_barrier()  # `lost` may be x
        tl.store(lost + row * lost_row + n, v - _wide(half, scale[:, None], most_float), mask=inside)
    tl.store(out + row * out_row + n, half, mask=inside)


@triton.jit(do_not_specialize=["numel", "tiles", "x_row", "scale_row", "out_row", "most_float"])
def _widen(
    values,
    scales,
    out,
    numel,
    tiles,
    x_row,
    scale_row,
    out_row,
    most_float,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if ALIGNED:
        numel = numel // 16 * 16
        x_row = x_row // 16 * 16
        out_row = out_row // 16 * 16
    row = (tl.program_id(0) // tiles).to(tl.int64)
    n = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = n < numel
    half = tl.load(values + row * x_row + n, mask=inside, other=0.0)
    scale = tl.load(scales + row * scale_row + n // BLOCK, mask=inside, other=0.0)
    tl.store(out + row * out_row + n, _wide(half, scale, most_float), mask=inside)


@triton.jit(do_not_specialize=["numel", "tiles", "x_row", "out_row", "lost_row"])
def _bfloat16(x, out, lost, numel, tiles, x_row, out_row, lost_row, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        numel = numel // 16 * 16
        x_row = x_row // 16 * 16
        out_row = out_row // 16 * 16
        lost_row = lost_row // 16 * 16
    row = (tl.program_id(0) // tiles).to(tl.int64)
    n = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = n < numel
    v = tl.load(x + row * x_row + n, mask=inside, other=0.0)
    bits = v.to(tl.int32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    upper = tl.where(v == v, upper, 0x7FFF)
    decoded = (upper << 16).to(tl.float32, bitcast=True)
    tl.debug_barrier()  # `lost` may be x
    tl.store(lost + row * lost_row + n, v - decoded, mask=inside)
    tl.store(out + row * out_row + n, upper.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["numel", "tiles", "x_row", "scale_row", "out_row", "lost_row"])
def _signs(
    x,
    scales,
    out,
    lost,
    numel,
    tiles,
    x_row,
    scale_row,
    out_row,
    lost_row,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    LOSES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if ALIGNED:
        numel = numel // 16 * 16
        x_row = x_row // 16 * 16
        out_row = out_row // 16 * 16
        lost_row = lost_row // 16 * 16
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * TILE
    n = first + tl.arange(0, TILE)
    inside = n < numel
    v = tl.load(x + row * x_row + n, mask=inside, other=0.0)
    below = v < 0
    if LOSES:
        scale = tl.load(scales + row * scale_row + n // BLOCK, mask=inside, other=0.0)
        tl.debug_barrier()  # `lost` may be x
        tl.store(lost + row * lost_row + n, v - tl.where(below, scale * -1.0, scale), mask=inside)
    fields = tl.reshape(below.to(tl.int32), (TILE // 8, 8))
    bytes_ = tl.sum(fields << tl.arange(0, 8)[None, :], axis=1)
    to = first // 8 + tl.arange(0, TILE // 8)
    tl.store(out + row * out_row + to, bytes_.to(tl.uint8), mask=to * 8 < numel)
