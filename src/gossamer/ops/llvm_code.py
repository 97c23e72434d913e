"""Loops over rows of blocks in the language of LLVM, and their compiling: what `ops.llvm_kernels` is written in.

A kernel is given the counts of rows, of numbers in a row and in a block; for each tensor its address and the bytes from
row to row; numbers. What is done to eight neighbors is written as vectors, so no compiler has to find out what may be
done at a time. The last numbers of a block, fewer than eight, are worked on in a copy that zeros fill up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

LANES = 8  # numbers of a vector
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
BYTES, SHORTS, INTS, FLOATS, HALVES = (ir.VectorType(one, LANES) for one in (BYTE, SHORT, INT, FLOAT, ir.HalfType()))
_ROOM = 4 * LANES  # bytes of eight numbers, at most
Value = Any  # of llvmlite, which has no types


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor that a kernel goes along, with `bits` for each number; 0: with one float32 for each block."""

    bits: int
    is_read: bool = False
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function in machine code; it lies in memory for as long as its engine lives. `streams`: what it is given."""

    run: Callable[..., None]
    engine: Any
    streams: tuple[Stream, ...]


class Code:
    """The body of a kernel, as it is written: arithmetic on a scalar or on eight numbers, and steps along a block."""

    def __init__(self, builder: Any, streams: Sequence[Stream]) -> None:
        self.builder = builder
        self._streams = streams
        rooms = [builder.alloca(INTS) for _ in streams]
        for room in rooms:
            room.align = _ROOM
        self._rooms = [builder.ptrtoint(room, LONG) for room in rooms]
        self.count: Value = None  # of the numbers of a block
        self._places: list[Value] = []

    def each_block(self, given: Sequence[Value], block: Callable[[list[Value]], None]) -> None:
        """Write the loops over rows and blocks; `block` is given where every tensor has the first of its numbers."""
        b, (rows, numel, width) = self.builder, given[:3]
        blocks = b.sdiv(b.sub(b.add(numel, width), long(1)), width)

        def of_row(row: Value) -> None:
            starts = [b.add(at, b.mul(row, step)) for at, step in zip(given[3::2], given[4::2], strict=True)]
            self.loop(0, blocks, 1, lambda index: of_block(starts, index))

        def of_block(starts: list[Value], index: Value) -> None:
            start = b.mul(index, width)
            left = b.sub(numel, start)
            self.count = b.select(b.icmp_signed("<", width, left), width, left)
            self._places = [
                b.add(at, _nbytes(b, start, stream.bits) if stream.bits else b.mul(index, long(4)))
                for at, stream in zip(starts, self._streams, strict=True)
            ]
            block(self._places)

        self.loop(0, rows, 1, of_row)

    def along(self, which: Sequence[int], work: Callable[..., Any], carried: Value = None) -> Value:
        """Write the loop over eights of a block: `work` is given where each of these tensors has them.

        What is `carried` is given last, and `work` returns it anew.
        """
        b = self.builder
        more = [] if carried is None else [carried]
        tail = b.and_(self.count, long(LANES - 1))
        whole = b.sub(self.count, tail)

        def of_eight(first: Value, *kept: Value) -> Any:
            at = [b.add(self._places[i], _nbytes(b, first, self._streams[i].bits)) for i in which]
            return [work(*at, *kept)] if kept else work(*at)

        more = self.loop(0, whole, LANES, of_eight, *more)
        before = b.block
        with b.if_then(b.icmp_signed(">", tail, long(0)), likely=False):
            ends = [b.add(self._places[i], _nbytes(b, whole, self._streams[i].bits)) for i in which]
            for i, end in zip(which, ends, strict=True):
                self.store(ir.Constant(INTS, [0] * LANES), self._rooms[i])
                if self._streams[i].is_read:
                    self._copy(end, self._rooms[i], tail, self._streams[i].bits)
            last = work(*(self._rooms[i] for i in which), *more)
            for i, end in zip(which, ends, strict=True):
                if self._streams[i].is_written:
                    self._copy(self._rooms[i], end, tail, self._streams[i].bits)
            inside = b.block
        if carried is None:
            return None
        found = b.phi(carried.type)
        found.add_incoming(more[0], before)
        found.add_incoming(last, inside)
        return found

    def load(self, address: Value, kind: Any) -> Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=_alignment(kind))

    def store(self, value: Value, address: Value) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=_alignment(value.type))

    def store_past_cache(self, value: Value, address: Value) -> None:
        """Write a vector to an address that it divides: memory that is overwritten need not be read for that."""
        store = self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=_ROOM)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(INT, 1)]))

    def eight(self, scalar: Value) -> Value:
        """Return eight times a number."""
        undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))

    def call(self, name: str, *values: Value, returns: Any = FLOATS) -> Value:
        """Call an intrinsic function of LLVM on vectors."""
        full = f"llvm.{name}.v{LANES}{'f32' if values[0].type == FLOATS else 'i32'}"
        found = self.builder.module.globals.get(full)
        kind = ir.FunctionType(returns, [value.type for value in values])
        return self.builder.call(found or ir.Function(self.builder.module, kind, full), values)

    def is_below(self, one: Value, other: Value) -> Value:
        """Return whether one number is less than the other; no for NaN."""
        return self.builder.fcmp_ordered("<", one, other)

    def loop(
        self, start: Value | int, stop: Value, step: int, body: Callable[..., Any], *carried: Value
    ) -> list[Value]:
        """Write a loop of `body`. It is given the index and what is carried, and returns the latter anew, in a list."""
        b, before = self.builder, self.builder.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        index, *kept = (b.phi(kind) for kind in (LONG, *(value.type for value in carried)))
        first = long(start) if isinstance(start, int) else start
        for phi, value in zip((index, *kept), (first, *carried), strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", index, stop), inside, after)
        b.position_at_end(inside)
        made = body(index, *kept) or []
        for phi, value in zip((index, *kept), (b.add(index, long(step)), *made), strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return kept

    def _copy(self, source: Value, target: Value, count: Value, bits: int) -> None:
        b, size = self.builder, max(bits, 8)
        nbytes = _nbytes(b, count, bits)

        def of_element(at: Value) -> None:
            self.store(self.load(b.add(source, at), ir.IntType(size)), b.add(target, at))

        self.loop(0, nbytes, size // 8, of_element)


def compiled(streams: Sequence[Stream], numbers: int, block: Callable[..., None]) -> Kernel:
    """Compile a kernel for this processor. `block` writes what is done to a block: see `Code.each_block`."""
    places = [LONG] * (3 + 2 * len(streams))
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*places, *[FLOAT] * numbers]), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    code = Code(builder, streams)
    code.each_block(function.args[: len(places)], lambda at: block(code, at, *function.args[len(places) :]))
    builder.fence("seq_cst")  # what was written past the cache is there for other threads, too
    builder.ret_void()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(places), *[ctypes.c_float] * numbers)
    return Kernel(kind(engine.get_function_address("kernel")), engine, tuple(streams))


def long(value: int) -> Value:
    return ir.Constant(LONG, value)


def single(value: float) -> Value:
    """Return the float32 nearest to a number."""
    return ir.Constant(FLOAT, value)


def floats(value: float) -> Value:
    return ir.Constant(FLOATS, [value] * LANES)


def integers(*values: int) -> Value:
    """Return eight integers: these, or eight times this one."""
    return ir.Constant(INTS, list(values if len(values) == LANES else values * LANES))


def _nbytes(builder: Any, count: Value, bits: int) -> Value:
    """Return the bytes that so many numbers take, the last one filled up."""
    if bits >= 8:
        return builder.mul(count, long(bits // 8))
    return builder.lshr(builder.add(builder.mul(count, long(bits)), long(7)), long(3))


def _alignment(kind: Any) -> int:
    """Return what may be relied on: tensors in a message lie at multiples of four bytes, packed codes anywhere."""
    if isinstance(kind, ir.VectorType):
        return _alignment(kind.element)
    return 4 if kind == FLOAT else 2 if isinstance(kind, ir.HalfType) else 1
