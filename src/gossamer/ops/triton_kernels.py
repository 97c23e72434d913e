"""The kernels of codecs, in Triton's language: what a program does to its tile. `ops.triton_codecs` launches them.

Every kernel takes tensors as (rows, numel) with the step from row to row. ALIGNED: all rows are whole vectors, which
the compiler learns from the product with 16. Where `lost` may be x, all of a tile is read before any of it is written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# What a kernel is given has the types of its launch; annotations would change what triton compiles.

from __future__ import annotations

import triton
import triton.language as tl

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
def quantize(
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
def dequantize(
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
def narrow(
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
def widen(
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
def bfloat16_losing(x, out, lost, numel, tiles, x_row, out_row, lost_row, TILE: tl.constexpr, ALIGNED: tl.constexpr):
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
def pack_signs(
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
