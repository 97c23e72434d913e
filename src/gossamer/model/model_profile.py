"""Profile of a model: its parameters and units, its flop, and the matmul rate of this machine."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.model.flop import flop_of
from gossamer.model.forward_adapter import ForwardAdapter
from gossamer.model.precision import Precision
from gossamer.model.side_effects import untouched
from gossamer.model.split.meta_init import without_storage
from gossamer.model.split.trace_backends import FakeTensorOps
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput

_TIME_S = 0.2  # for the measurement of the peak
_SMALLEST, _LARGEST = 128, 8192  # rows of a square matmul
_KINDS, _LARGEST_PART, _TOKENS, _REPEATS = 3, 1024, 256, 4  # of matrices that are measured in several types


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The parameters, memory and units of one model, as built."""

    parameters: int  # tied ones once
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    units: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]  # names that share one parameter
    dtype: torch.dtype  # of most parameters


def facts_of(module: nn.Module) -> ModelProfile:
    """Count the parameters, bytes and units of `module`, without running it."""
    parameters = list(module.parameters())
    sizes: dict[torch.dtype, int] = {}
    for p in parameters:
        sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    return ModelProfile(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        units=unit_names(module),
        tied=tied_names(module),
        dtype=max(sizes, key=sizes.__getitem__) if sizes else torch.float32,
    )


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more names of one and the same parameter; the canonical name comes first."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def forward_flop_per_token(module: nn.Module, caller: ForwardAdapter, batch: Mapping[str, Tensor]) -> float:
    """Return the multiplications and additions (flop) of a forward over `batch`, per token of its `input_ids`.

    They are counted by running a copy of the module once, in evaluation mode and on fake tensors where a parameter is
    involved. One sequence of the run's own length is enough, and needed, as attention grows with it. The module itself
    is not run. Convolutions, matmuls and attention count; elementwise operators do not. If the model cannot be copied
    or counted (operators of its own, branches on what it computes), the result is 2 flop per parameter.
    """
    tokens = batch["input_ids"].numel()
    try:
        counted = _counted(module, caller, batch)
    except BadInput:  # a refusal of a mode around the forward
        raise
    except Exception:  # whatever a forward does with tensors without data
        counted = 0.0
    return counted / tokens if counted else 2.0 * sum(p.numel() for p in module.parameters())


def _counted(module: nn.Module, caller: ForwardAdapter, batch: Mapping[str, Tensor]) -> float:
    counted = 0.0
    with untouched(module):  # globals and generators are those of the copy too
        outline = without_storage(module)
        outline.eval()
        with torch.enable_grad(), _Counting(outline) as counting:  # the forward may compute a gradient itself
            caller(outline, batch)
            counted = float(counting.flop)
        torch.clear_autocast_cache()
    return counted


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs operators on shapes alone, and sums their flop."""

    def __init__(self, outline: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = FakeTensorOps(outline)
        self.flop: float = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._operators.run(func, args, kwargs or {})
        self.flop += flop_of(func, args, kwargs or {}, out)
        return out


def training_flop_per_token(forward_flop: float, trained_fraction: float = 1.0) -> float:
    """Return the flop of forward and backward, without what recomputation adds: the numerator of MFU.

    `trained_fraction`: of the parameters, those that are not frozen. Backward takes one matmul for the gradient of its
    input and, where it is trained, one for that of the weight.
    """
    return forward_flop * (2 + trained_fraction)


def measure_peak_flop_per_s(dtype: torch.dtype, device: torch.device | None = None) -> float:
    """Measure the best rate of a matmul on this device with the threads of this process: the denominator of MFU.

    It is the best of `dtype` and fp32, as a processor without arithmetic in `dtype` is slower in it, and of square and
    oblong matrices. Takes about 0.3 s for each type, once in a process.
    """
    device = device or torch.device("cpu")
    return max(_best_rate(one, device, torch.get_num_threads()) for one in dict.fromkeys((dtype, torch.float32)))


@functools.cache
def _best_rate(dtype: torch.dtype, device: torch.device, threads: int) -> float:
    """Return the best matmul rate in `dtype`; `threads` are those that torch computes with now.

    The size doubles until one matmul takes a twentieth of the time. The best of all counts, as other work on the
    machine can only slow one down. Where it takes the cores so that threads wait for each other through the smallest
    matmul, one thread is faster than all.
    """
    size, best = _doubled(dtype, device)
    if threads > 1 and size == _SMALLEST:
        torch.set_num_threads(1)
        try:
            best = max(best, _doubled(dtype, device)[1])
        finally:
            torch.set_num_threads(threads)
    return best


def _doubled(dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    """Return the size at which the doubling ended, and the best rate."""
    size, best = _SMALLEST, 0.0
    began = time.perf_counter()
    while True:
        timed = [_matmul(*shape, dtype, device) for shape in _shapes(size)]
        for multiply in timed:
            multiply()  # chooses kernels, wakes threads
        seconds = min(multiply() for multiply in timed)
        best = max(best, 2.0 * size**3 / seconds)
        if seconds > _TIME_S / 20 or size >= _LARGEST or time.perf_counter() - began > _TIME_S:
            break
        size *= 2
    while time.perf_counter() - began < _TIME_S:
        best = max(best, *(2.0 * size**3 / multiply() for multiply in timed))
    return size, best


def _shapes(size: int) -> tuple[tuple[int, int, int], ...]:
    """Return (rows, inner, columns) of matmuls of equal flop: square, as into a wide layer, and out of one."""
    return (size, size, size), (size // 4, size, 4 * size), (size, 4 * size, size // 4)


def _matmul(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> Callable[[], float]:
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(columns, inner, dtype=dtype, device=device)
    return _timed(lambda: a @ b.t(), device)  # as a linear layer does it


def matmul_seconds(
    shapes: Sequence[tuple[int, int]], tokens: int, precisions: Sequence[Precision], device: torch.device
) -> tuple[float, ...]:
    """Return, for each precision, the seconds of the matmuls of matrices with these shapes, forward and backward.

    They run as in training (float32 weights, cast in every forward); the best of a few runs, taken in turn. Takes about
    a second: measures the three kinds of matrices that cost most, in parts of at most 1024 by 1024, with 256 tokens.
    """
    counts = Counter(shapes)
    most = sorted(counts, key=lambda shape: -counts[shape] * shape[0] * shape[1])[:_KINDS]
    generator, total = torch.Generator().manual_seed(0), [0.0] * len(precisions)
    for rows, columns in most:
        part = min(rows, _LARGEST_PART), min(columns, _LARGEST_PART)
        weight = torch.randn(part, generator=generator).to(device).requires_grad_()
        x = torch.randn(min(tokens, _TOKENS), part[1], generator=generator).to(device).requires_grad_()
        times = [
            [_timed(functools.partial(_linear, weight, x, one), device)() for one in precisions]
            for _ in range(_REPEATS + 1)
        ][1:]  # the first chooses kernels
        scale = counts[rows, columns] * rows * columns / (part[0] * part[1])
        total = [sum_s + scale * min(column) for sum_s, column in zip(total, zip(*times, strict=True), strict=True)]
    return tuple(total)


def _linear(weight: Tensor, x: Tensor, precision: Precision) -> Tensor:
    with torch.enable_grad(), precision.autocast(x.device):
        y = nn.functional.linear(x, weight)
    torch.autograd.grad(y, (weight, x), torch.ones_like(y))
    return y


def _timed(work: Callable[[], Tensor], device: torch.device) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(time.perf_counter() - began, 1e-9)

    return run
