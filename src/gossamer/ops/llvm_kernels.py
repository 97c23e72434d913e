"""The kernels of codecs on a CPU, in the language of LLVM: what is done to a block. `ops.llvm_codecs` calls them.

Of eight numbers all are read before any is written, so `lost` may be x. A form that is not asked for (of other bits,
without `lost`) is not compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from gossamer.ops.llvm_code import (
    BYTE,
    BYTES,
    FLOAT,
    FLOATS,
    HALVES,
    INT,
    INTS,
    LANES,
    LONG,
    SHORTS,
    Code,
    Kernel,
    Stream,
    Value,
    compiled,
    floats,
    integers,
    long,
    single,
)
from gossamer.ops.quantize import SMALLEST

_ROWS = 16  # of four vectors, that torch adds before it adds their sums to those of the rows before
_X = Stream(32, is_read=True)
_WRITTEN = Stream(32, is_written=True)
_SCALES = Stream(0)
_INFINITE = float("inf")
_MOST = (2 - 2.0**-23) * 2.0**127  # the largest float32


@cache
def quantize(bits: int, loses: bool, shakes: bool) -> Kernel:
    """Tensors: x, scales, codes; what is lost, where it `loses`; int16 noise, where it `shakes`. Numbers: levels."""
    streams = [_X, _SCALES, Stream(bits, is_written=True), *[_WRITTEN] * loses, *[Stream(16, is_read=True)] * shakes]

    def block(code: Code, at: list[Value], level: Value) -> None:
        b = code.builder
        top = b.bitcast(_largest(code), FLOAT)
        top = b.fmul(top, single(1 + 2.0**-22)) if shakes else top
        scale = b.fdiv(top, level)
        code.store(scale, at[1])
        inverse = b.fmul(b.fdiv(single(1.0), top), level)
        factor = code.eight(b.select(code.is_below(top, single(SMALLEST)), single(0.0), inverse))
        minus = code.eight(b.fmul(scale, single(-1.0)))

        def work(x: Value, out: Value, *more: Value) -> None:
            v = code.load(x, FLOATS)
            steps = b.fmul(v, factor)
            if shakes:
                noise = b.or_(b.sext(code.load(more[-1], SHORTS), INTS), integers(1))
                steps = b.fadd(steps, b.fmul(b.sitofp(noise, FLOATS), floats(2.0**-16)))
            steps = code.call("rint", steps)
            if loses:
                code.store(code.call("fma", steps, minus, v), more[0])
            code.store(_packed(code, steps, bits), out)

        code.along([0, *range(2, len(streams))], work)

    return compiled(streams, 1, block)


@cache
def dequantize(bits: int, adds: bool, is_large: bool = False) -> Kernel:
    """Tensors: codes, scales, where the numbers go or, where it `adds`, are added; past the cache where `is_large`."""
    streams = [Stream(bits, is_read=True), _SCALES, Stream(32, is_read=adds, is_written=True)]

    def block(code: Code, at: list[Value]) -> None:
        scale = code.eight(code.load(at[1], FLOAT))

        def work(codes: Value, out: Value) -> None:
            steps = _unpacked(code, codes, bits)
            if adds:
                code.store(code.call("fma", steps, scale, code.load(out, FLOATS)), out)
            else:
                store = code.store_past_cache if is_large else code.store
                store(code.builder.fmul(steps, scale), out)

        code.along([0, 2], work)

    return compiled(streams, 0, block)


@cache
def encode_signs(takes_means: bool, loses: bool) -> Kernel:
    """Tensors: x, scales, bytes; what is lost, where it `loses`. The scales are given, or the kernel `takes_means`."""

    def block(code: Code, at: list[Value]) -> None:
        b = code.builder
        scale = _mean_magnitude(code, at[0]) if takes_means else code.load(at[1], FLOAT)
        if takes_means:
            code.store(scale, at[1])
        plus, minus = code.eight(scale), code.eight(b.fmul(scale, single(-1.0)))

        def work(x: Value, out: Value, *lost: Value) -> None:
            v = code.load(x, FLOATS)
            below = code.is_below(v, floats(0.0))
            if loses:
                code.store(b.fsub(v, b.select(below, minus, plus)), lost[0])
            code.store(b.bitcast(below, BYTE), out)

        code.along([0, *range(2, 3 + loses)], work)

    return compiled([_X, _SCALES, Stream(1, is_written=True), *[_WRITTEN] * loses], 0, block)


@cache
def narrow(loses: bool) -> Kernel:
    """Tensors: x, scales, float16; what is lost, where it `loses`. Numbers: 2^top, 2^-top, 2^(top - 127)."""

    def block(code: Code, at: list[Value], up: Value, down: Value, least: Value) -> None:
        b, infinite = code.builder, single(_INFINITE)
        most = _largest(code)
        is_small = code.is_below(b.bitcast(most, FLOAT), single(SMALLEST))
        power = b.bitcast(b.and_(most, ir.Constant(INT, 0x7F800000)), FLOAT)  # infinite for NaN
        is_kept = b.or_(is_small, code.is_below(least, power))
        power = b.select(is_kept, power, least)
        scale = b.fmul(power, down)
        code.store(scale, at[1])
        factor = b.select(is_small, single(0.0), b.fmul(b.fdiv(single(1.0), power), up))
        factor = code.eight(b.select(code.is_below(power, infinite), factor, single(1.0)))

        def work(x: Value, out: Value, *lost: Value) -> None:
            v = code.load(x, FLOATS)
            half = b.fptrunc(b.fmul(v, factor), HALVES)
            if loses:
                code.store(b.fsub(v, _wide(code, half, scale)), lost[0])
            code.store(half, out)

        code.along([0, *range(2, 3 + loses)], work)

    return compiled([_X, _SCALES, Stream(16, is_written=True), *[_WRITTEN] * loses], 3, block)


@cache
def widen(is_large: bool) -> Kernel:
    """Tensors: float16, scales, where the numbers go, past the cache where `is_large`."""

    def block(code: Code, at: list[Value]) -> None:
        scale = code.load(at[1], FLOAT)

        def work(values: Value, out: Value) -> None:
            store = code.store_past_cache if is_large else code.store
            store(_wide(code, code.load(values, HALVES), scale), out)

        code.along([0, 2], work)

    return compiled([Stream(16, is_read=True), _SCALES, Stream(32, is_written=True)], 0, block)


@cache
def bfloat16_losing() -> Kernel:
    """Tensors: x, bfloat16, what is lost."""

    def block(code: Code, at: list[Value]) -> None:
        b = code.builder

        def work(x: Value, out: Value, lost: Value) -> None:
            v = code.load(x, FLOATS)
            bits = b.bitcast(v, INTS)
            is_odd = b.and_(b.lshr(bits, integers(16)), integers(1))
            near = b.lshr(b.add(b.add(bits, integers(0x7FFF)), is_odd), integers(16))  # ties to even
            upper = b.select(b.fcmp_ordered("ord", v, v), near, integers(0x7FFF))
            code.store(b.fsub(v, b.bitcast(b.shl(upper, integers(16)), FLOATS)), lost)
            code.store(b.trunc(upper, SHORTS), out)

        code.along([0, 1, 2], work)

    return compiled([_X, Stream(16, is_written=True), _WRITTEN], 0, block)


@cache
def has_half() -> bool:
    """Return whether this processor converts float16: elsewhere LLVM calls a function that is not there."""
    return bool(llvm.get_host_cpu_features().get("f16c")) or llvm.get_process_triple().startswith(("aarch64", "arm64"))


def _largest(code: Code) -> Value:
    """Return the bits of the largest magnitude of a block: those of NaN where one is, as they are the largest."""
    b = code.builder

    def work(x: Value, most: Value) -> Any:
        size = b.and_(code.load(x, INTS), integers(0x7FFFFFFF))
        return b.select(b.icmp_signed("<", most, size), size, most)

    return code.call("vector.reduce.smax", code.along([0], work, integers(0)), returns=INT)


def _mean_magnitude(code: Code, x: Value) -> Value:
    """Return the mean magnitude of a block at x, of up to 8192 numbers, in the order of torch with vectors of eight.

    Those are added in four columns, 16 rows at a time; then the vectors that are left and the columns to the first one;
    then what is less than a vector, and the eight. Fewer than eight numbers are summed as such columns are.
    """
    b, nothing = code.builder, floats(0.0)
    eights = b.lshr(code.count, long(3))
    rows = b.lshr(eights, long(2))
    groups = b.and_(rows, long(-_ROWS))

    def size(first: Value, index: int = 0) -> Value:
        bits = code.load(b.add(b.add(x, b.mul(first, long(4))), long(32 * index)), INTS)
        return b.bitcast(b.and_(bits, integers(0x7FFFFFFF)), FLOATS)

    def of_row(row: Value, *sums: Value) -> list[Value]:
        return [b.fadd(one, size(b.mul(row, long(32)), i)) for i, one in enumerate(sums)]

    def of_group(row: Value, *sums: Value) -> list[Value]:
        here = code.loop(row, b.add(row, long(_ROWS)), 1, of_row, *[nothing] * 4)
        return [b.fadd(one, more) for one, more in zip(sums, here, strict=True)]

    def of_eight(index: Value, total: Value) -> list[Value]:
        return [b.fadd(total, size(b.mul(index, long(8))))]

    def of_one(index: Value, total: Value) -> list[Value]:
        bits = b.and_(code.load(b.add(x, b.mul(index, long(4))), INT), ir.Constant(INT, 0x7FFFFFFF))
        return [b.fadd(total, b.bitcast(bits, FLOAT))]

    whole = code.loop(0, groups, _ROWS, of_group, *[nothing] * 4)
    left = code.loop(groups, rows, 1, of_row, *[nothing] * 4)
    columns = [b.fadd(one, other) for one, other in zip(left, whole, strict=True)]
    (total,) = code.loop(b.mul(rows, long(4)), eights, 1, of_eight, columns[0])
    for column in columns[1:]:
        total = b.fadd(total, column)
    is_short = b.icmp_signed("<", code.count, long(LANES))
    first = b.select(is_short, long(4), b.and_(code.count, long(-LANES)))
    start = b.select(is_short, long(1), code.count)  # 0 is added before, 4 and more come before 1, 2 and 3
    (found,) = code.loop(0, b.zext(is_short, LONG), 1, of_one, single(0.0))
    (found,) = code.loop(first, code.count, 1, of_one, found)
    end = b.select(b.icmp_signed("<", code.count, long(4)), code.count, long(4))
    (found,) = code.loop(start, end, 1, of_one, found)
    for lane in range(LANES):
        found = b.fadd(found, b.extract_element(total, ir.Constant(INT, lane)))
    return b.fdiv(found, b.sitofp(code.count, FLOAT))


def _packed(code: Code, steps: Value, bits: int) -> Value:
    """Return the codes of eight whole numbers, of zero for NaN, side by side."""
    b = code.builder
    known = b.select(b.fcmp_ordered("ord", steps, steps), steps, floats(0.0))  # the integer of NaN may be any
    whole = b.fptosi(known, INTS)
    if bits == 8:
        return b.trunc(whole, BYTES)
    fields = b.and_(whole, integers((1 << bits) - 1))
    apart = b.shl(fields, integers(*(bits * i for i in range(LANES))))
    word = code.call("vector.reduce.or", apart, returns=INT)
    return word if bits == 4 else b.trunc(word, ir.IntType(8 * bits))


def _unpacked(code: Code, codes: Value, bits: int) -> Value:
    """Return the eight whole numbers whose codes lie side by side."""
    b = code.builder
    if bits == 8:
        return b.sitofp(b.sext(code.load(codes, BYTES), INTS), FLOATS)
    word = code.load(codes, ir.IntType(8 * bits))
    words = code.eight(word if bits == 4 else b.zext(word, INT))
    top = b.shl(words, integers(*(32 - bits - bits * i for i in range(LANES))))
    steps = b.ashr(top, integers(32 - bits))
    return b.sitofp(b.or_(steps, integers(1)) if bits == 1 else steps, FLOATS)  # one bit: 0 is 1 and 1 is -1


def _wide(code: Code, halves: Value, scale: Value) -> Value:
    """Return float16 times a block's power of two; what rounding made larger than any float32 is the largest one."""
    b = code.builder
    product = b.fmul(b.fpext(halves, FLOATS), code.eight(scale))
    is_finite = code.is_below(scale, single(_INFINITE))
    for sign, beyond in ((1, ">"), (-1, "<")):
        end = code.eight(b.select(is_finite, single(sign * _MOST), single(sign * _INFINITE)))
        product = b.select(b.fcmp_ordered(beyond, product, end), end, product)
    return product
