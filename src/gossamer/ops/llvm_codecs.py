"""Codecs as kernels on a CPU: one reading and one writing of memory, where torch takes several passes and some scratch.

Every function has the arguments and the results of the passes that it stands for (`ops.quantize`, `ops.low_precision`),
bit for bit, but that NaN is NaN whatever its other bits are; `ops.triton_codecs` says what makes that possible. LLVM
compiles a kernel as it is first used, in some hundredths of a second, and nothing is kept on a disk. A kernel takes one
thread, and Python runs meanwhile. fp8 is left to the passes.
Work: the bytes of the numbers and of the message, once, but that a block is read twice, from the cache.
This module imports llvmlite; `ops.fused` imports it, and nobody else does. The kernels are in `ops.llvm_kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.ops import llvm_kernels as kernels
from gossamer.ops.blocks import as_rows, dense_rows, span_size, spans
from gossamer.ops.llvm_code import Kernel
from gossamer.ops.quantize import mean_magnitudes
from gossamer.ops.rounding_noise import Noise

_LARGE = 1 << 21  # numbers: 8 MiB, more than a core has of the cache; below, what comes next finds them there


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
    """Do what `ops.quantize.quantize` does."""
    rows, scales, out = dense_rows(x), as_rows(scales), as_rows(out)
    losses = [] if lost is None else [as_rows(lost)]
    kernel = kernels.quantize(bits, lost is not None, generator is not None)
    if generator is None:
        _run(kernel, rows.shape[1], block, [rows, scales, out, *losses], float(levels))
        return
    noise = Noise(-(-span_size(rows, block) // 2), generator, x.device)
    for cut in spans(rows, block):  # a span has one pair of the noise, as in the passes
        numbers = [[span.flatten(1) for span in cut.numbers(t)] for t in (rows, *losses)]
        for values, scale, target, *loss in zip(
            numbers[0], cut.blocks(scales), cut.packed(out, bits), *numbers[1:], strict=True
        ):
            words = noise.words(-(-values.numel() // 2)).view(torch.int16)[: values.numel()].view(values.shape)
            _run(kernel, values.shape[1], cut.width, [values, scale, target, *loss, words], float(levels))


def dequantize(levels: Tensor, scales: Tensor, block: int, bits: int = 8, numel: int | None = None) -> Tensor:
    """Do what `ops.quantize.dequantize` does."""
    numel = levels.shape[-1] if numel is None else numel
    out = torch.empty((*levels.shape[:-1], numel), dtype=torch.float32)
    _run(
        kernels.dequantize(bits, False, _is_large(out, block)),
        numel,
        block,
        [dense_rows(levels), dense_rows(scales), as_rows(out)],
    )
    return out


def add_dequantized(total: Tensor, levels: Tensor, scales: Tensor, block: int, bits: int = 8) -> None:
    """Do what `ops.quantize.add_dequantized` does."""
    tensors = [dense_rows(levels), dense_rows(scales), as_rows(total)]
    _run(kernels.dequantize(bits, True), total.shape[-1], block, tensors)


def encode_signs(x: Tensor, scales: Tensor, out: Tensor, block: int, lost: Tensor | None = None) -> None:
    """Do what `ops.quantize.encode_signs` does, for blocks of up to 8192 numbers.

    Where the vectors of torch are not of eight numbers, it adds in another order, and the means are left to it.
    """
    takes_means = torch.backends.cpu.get_cpu_capability() == "AVX2"
    if not takes_means:
        mean_magnitudes(x, scales, block)
    losses = [] if lost is None else [as_rows(lost)]
    tensors = [dense_rows(x), as_rows(scales), as_rows(out), *losses]
    _run(kernels.encode_signs(takes_means, lost is not None), x.shape[-1], block, tensors)


def narrow(x: Tensor, block: int, top: int, scales: Tensor, out: Tensor, lost: Tensor | None = None) -> None:
    """Do what `ops.low_precision.narrow` does to float16."""
    _check_half()
    losses = [] if lost is None else [as_rows(lost)]
    tensors = [dense_rows(x), as_rows(scales), as_rows(out), *losses]
    _run(kernels.narrow(lost is not None), x.shape[-1], block, tensors, 2.0**top, 2.0**-top, 2.0 ** (top - 127))


def widen(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Do what `ops.low_precision.widen` does, for float16."""
    _check_half()
    out = torch.empty(values.shape, dtype=torch.float32)
    _run(
        kernels.widen(_is_large(out, block)),
        values.shape[-1],
        block,
        [dense_rows(values), dense_rows(scales), as_rows(out)],
    )
    return out


def bfloat16_losing(x: Tensor, out: Tensor, lost: Tensor) -> None:
    """Do what `ops.low_precision.bfloat16_losing` does."""
    numel = x.shape[-1]
    _run(kernels.bfloat16_losing(), numel, max(1, numel), [dense_rows(x), as_rows(out), as_rows(lost)])


def _is_large(out: Tensor, block: int) -> bool:
    """Return whether decoded numbers would leave the cache anyway, and lie so that they can be written past it."""
    is_aligned = out.data_ptr() % 32 == 0 and block % 8 == 0 and (out.shape[-1] % 8 == 0 or out.dim() == 1)
    return is_aligned and out.numel() >= _LARGE


def _check_half() -> None:
    if not kernels.has_half():
        raise NotImplementedError("this processor does not convert float16")


def _run(kernel: Kernel, numel: int, block: int, tensors: list[Tensor], *numbers: float) -> None:
    """Run a kernel on tensors (rows, ...) that lie side by side in a row.

    Machine code finds no end by itself: raises ValueError for a tensor that is shorter than what it would go along.
    """
    rows, blocks = tensors[0].shape[0], -(-numel // block)
    places = list[int]()
    for number, (t, stream) in enumerate(zip(tensors, kernel.streams, strict=True)):
        bits = numel * stream.bits if stream.bits else 32 * blocks
        if t.shape[0] != rows or 8 * t.shape[1] * t.element_size() < bits:
            raise ValueError(
                f"tensor {number} has {tuple(t.shape)} of {t.dtype}, wanted {rows} rows of {bits} bits each"
            )
        places += (t.data_ptr(), t.stride(0) * t.element_size())
    kernel.run(rows, numel, block, *places, *numbers)
