"""The arithmetic of codecs, by kernels where the device has them, else by passes of torch: the one place that decides.

A kernel runs where the package that compiles it is installed, unless GOSSAMER_KERNELS is 0: on CUDA tensors triton
(`ops.triton_codecs`), which torch's CUDA builds bring, on CPU tensors llvmlite (`ops.llvm_codecs`). Before its first
use on a device it encodes a few blocks of every kind of number and is compared with the passes (`ops.quantize`,
`ops.low_precision`). If it gives other bits, or cannot be compiled, a warning says so and the passes are used. So the
bytes do not depend on which of both ran, and ranks may differ in it.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gossamer.ops import low_precision
from gossamer.ops import quantize as integer

SWITCH = "GOSSAMER_KERNELS"  # 0: passes of torch everywhere
_MOST_BLOCK = 8192  # numbers of a block that a kernel holds
_TURN = threading.Lock()  # of threads that compile and compare: the first one does it for all
_PASSES: dict[str, Callable[..., Any]] = {
    "quantize": integer.quantize,
    "dequantize": integer.dequantize,
    "add_dequantized": integer.add_dequantized,
    "encode_signs": integer.encode_signs,
    "narrow": low_precision.narrow,
    "widen": low_precision.widen,
    "bfloat16_losing": low_precision.bfloat16_losing,
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The module of kernels for a type of devices, and the package that it imports."""

    package: str
    module: Callable[[], ModuleType]


def _triton_codecs() -> ModuleType:
    from gossamer.ops import triton_codecs

    return triton_codecs


def _llvm_codecs() -> ModuleType:
    from gossamer.ops import llvm_codecs

    return llvm_codecs


TRITON, LLVM = Kernels("triton", _triton_codecs), Kernels("llvmlite", _llvm_codecs)
DEVICES = {"cuda": TRITON, "cpu": LLVM}


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
    """Quantize as `ops.quantize.quantize` does."""
    kind = _Kind("quantize", block, bits, levels, rounds_at_random=generator is not None, loses=lost is not None)
    _chosen(kind, x, lost)(x, block, levels, scales, out, generator, bits, lost)


def dequantize(levels: Tensor, scales: Tensor, block: int, bits: int = 8, numel: int | None = None) -> Tensor:
    """Decode as `ops.quantize.dequantize` does."""
    found: Tensor = _chosen(_Kind("dequantize", block, bits), levels)(levels, scales, block, bits, numel)
    return found


def add_dequantized(total: Tensor, levels: Tensor, scales: Tensor, block: int, bits: int = 8) -> None:
    """Decode and add as `ops.quantize.add_dequantized` does."""
    _chosen(_Kind("add_dequantized", block, bits), total, total)(total, levels, scales, block, bits)


def encode_signs(x: Tensor, scales: Tensor, out: Tensor, block: int, lost: Tensor | None = None) -> None:
    """Take means and pack signs as `ops.quantize.encode_signs` does."""
    _chosen(_Kind("encode_signs", block, loses=lost is not None), x, lost)(x, scales, out, block, lost)


def narrow(x: Tensor, block: int, top: int, scales: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
    """Scale and convert as `ops.low_precision.narrow` does."""
    kind = _Kind("narrow", block, 16, top, loses=lost is not None)
    work = _chosen(kind, x, lost) if out.dtype == torch.float16 else low_precision.narrow
    work(x, block, top, scales, out, lost)


def widen(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Convert back as `ops.low_precision.widen` does."""
    is_half = values.dtype == torch.float16
    work = _chosen(_Kind("widen", block, 16), values) if is_half else low_precision.widen
    found: Tensor = work(values, scales, block)
    return found


def bfloat16_losing(x: Tensor, out: Tensor, lost: Tensor) -> None:
    """Convert as `ops.low_precision.bfloat16_losing` does."""
    _chosen(_Kind("bfloat16_losing", 16, loses=True), x, lost)(x, out, lost)


def has_kernels(device: torch.device) -> bool:
    """Return whether kernels may run on a device, as far as is known without one."""
    kernels = DEVICES.get(device.type)
    return kernels is not None and os.environ.get(SWITCH) != "0" and find_spec(kernels.package) is not None


@dataclass(frozen=True, slots=True)
class _Kind:
    """An operation with what a kernel of it is compiled for."""

    operation: str
    block: int
    bits: int = 1
    levels: int = 0
    rounds_at_random: bool = False
    loses: bool = False


def _chosen(kind: _Kind, x: Tensor, written: Tensor | None = None) -> Callable[..., Any]:
    """Return what computes an operation on x. `written`: a tensor that it writes to, where it lies."""
    has_kernel = x.device.type in DEVICES and kind.block <= _MOST_BLOCK and os.environ.get(SWITCH) != "0"
    if not has_kernel or (written is not None and not _is_rows(written)):
        return _PASSES[kind.operation]
    with _TURN:
        kernel = _compared(kind, x.device)
    return kernel or _PASSES[kind.operation]


def _is_rows(t: Tensor) -> bool:
    """Return whether t is (rows, numel) where it lies, with neighbors side by side: a kernel writes to no copy."""
    return (t.dim() <= 2 or t.is_contiguous()) and (t.shape[-1] <= 1 or t.stride(-1) == 1)


@cache
def _compared(kind: _Kind, device: torch.device) -> Callable[..., Any] | None:
    """Return the kernel of an operation if there is one that gives the bits of the passes; it is compiled then."""
    kernels = DEVICES[device.type]
    if find_spec(kernels.package) is None:
        return None
    try:
        kernel: Callable[..., Any] = getattr(kernels.module(), kind.operation)
        passes = _PASSES[kind.operation]
        sizes = (3 * kind.block + 5, 16 * kind.block)  # with a short block, and of whole vectors
        is_same = all(
            _same_bits(a, b)
            for numel in sizes
            for a, b in zip(_outcome(kind, kernel, numel, device), _outcome(kind, passes, numel, device), strict=True)
        )
    except NotImplementedError:  # this processor lacks what the kernel needs
        return None
    except Exception as error:  # triton needs a C compiler and a known GPU, LLVM a known CPU; each has its own errors
        _say(kind, device, f"cannot be used ({type(error).__name__}: {error})")
        return None
    if not is_same:
        _say(kind, device, "gives other bits")
    return kernel if is_same else None


def _say(kind: _Kind, device: torch.device, what: str) -> None:
    said = f"the kernel of {kind.operation} {what} on {device}: passes of torch are used; {SWITCH}=0 asks for them"
    warnings.warn(said, RuntimeWarning, stacklevel=4)


def _outcome(kind: _Kind, work: Callable[..., Any], numel: int, device: torch.device) -> list[Tensor]:
    """Return what an operation gives for a sample of every kind of number, as far as it means something.

    Codes beside a scale that is not finite mean nothing: of the row that has such, what it decodes to is returned.
    """
    x = _sample(kind.block, numel).to(device)
    blocks, nbytes = -(-numel // kind.block), -(-numel * kind.bits // 8)
    scales = (1 + torch.arange(2 * blocks, device=device, dtype=torch.float32)).view(2, blocks) / 3
    lost = torch.empty_like(x) if kind.loses else None
    losses = [] if lost is None else [lost]
    if kind.operation == "quantize":
        codes = torch.zeros(2, nbytes, device=device, dtype=torch.int8 if kind.bits == 8 else torch.uint8)
        rng = torch.Generator(device).manual_seed(5) if kind.rounds_at_random else None
        work(x, kind.block, kind.levels, scales, codes, rng, kind.bits, lost)
        decoded = integer.dequantize(codes, scales, kind.block, kind.bits, numel)
        return [codes[:1], scales, decoded, *losses]
    if kind.operation == "narrow":
        half = torch.empty(2, numel, device=device, dtype=torch.float16)
        work(x, kind.block, kind.levels, scales, half, lost)
        return [half[:1], scales, low_precision.widen(half, scales, kind.block), *losses]
    if kind.operation == "widen":
        low_precision.narrow(x, kind.block, 14, scales, half := torch.empty_like(x, dtype=torch.float16))
        return [work(half, scales, kind.block)]
    if kind.operation == "bfloat16_losing":
        short = torch.empty(2, numel, device=device, dtype=torch.bfloat16)
        work(x, short, lost)
        return [short, *losses]
    codes = torch.zeros(2, nbytes, device=device, dtype=torch.int8 if kind.bits == 8 else torch.uint8)
    if kind.operation == "encode_signs":
        work(x, scales, codes, kind.block, lost)
        return [codes, scales, *losses]
    codes.view(torch.uint8).copy_(torch.arange(2 * nbytes, device=device).view(2, nbytes) * 37 % 256)
    if kind.operation == "dequantize":
        return [work(codes, scales, kind.block, kind.bits, numel)]
    work(x, codes, scales, kind.block, kind.bits)
    return [x]


def _sample(block: int, numel: int) -> Tensor:
    """Return (2, numel) numbers in blocks that are usual, zero, tiny and huge, and in the second row not finite."""
    x = torch.randn(2, numel, generator=torch.Generator().manual_seed(1))
    x[0, block : 2 * block] *= 0.0
    x[0, 2 * block : 3 * block] *= 1e-37
    x[1, 0], x[1, block] = torch.inf, torch.nan
    x[1, 2 * block : 3 * block] *= 1e37
    return x


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether all bits are equal, but that NaN is NaN."""
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    bits = {2: torch.int16, 4: torch.int32}[one.dtype.itemsize]
    a, b = (torch.where(t.isnan(), torch.zeros_like(t), t).view(bits) for t in (one, other))
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(a, b)
