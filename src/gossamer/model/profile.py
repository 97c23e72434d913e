"""What a model is made of, what it costs, and how fast this machine multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gossamer.model.call import Caller
from gossamer.model.flop import UNCOUNTED
from gossamer.model.units import unit_names

_TIME_S = 0.2  # for the measurement of the peak
_LARGEST = 8192
_BACKWARD = 2  # backward takes two matmuls for every one of forward


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One model, as built."""

    parameters: int  # tied ones once
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    units: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]  # names that share one parameter
    dtype: torch.dtype  # of most parameters


def facts_of(module: nn.Module) -> Facts:
    """Count `module`; runs nothing."""
    parameters = list(module.parameters())
    sizes: dict[torch.dtype, int] = {}
    for p in parameters:
        sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    return Facts(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        units=unit_names(module),
        tied=tied_names(module),
        dtype=max(sizes, key=sizes.__getitem__) if sizes else torch.float32,
    )


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of two or more names that are one and the same parameter; the canonical name comes first."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def forward_flop_per_token(module: nn.Module, caller: Caller, batch: Mapping[str, Tensor]) -> float:
    """Multiplications and additions (flop) of a forward over `batch`, per token of its `input_ids`.

    Counted by running it once, in evaluation mode and without gradients: one sequence of the run's own length is
    enough, and needed, as attention grows with it. Convolutions, matmuls and attention count; what is elementwise
    does not. Where the model cannot be counted (operators of its own), 2 flop per parameter.
    """
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    was = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), counter:
            caller(module, batch)
    finally:
        for one, training in was.items():
            one.training = training
    counted = float(counter.get_total_flops())
    tokens = batch["input_ids"].numel()
    return counted / tokens if counted else 2.0 * sum(p.numel() for p in module.parameters())


def training_flop_per_token(forward_flop: float) -> float:
    """Forward and backward, without what recomputing adds: the numerator of MFU."""
    return forward_flop * (1 + _BACKWARD)


def measure_peak_flop_per_s(dtype: torch.dtype, device: torch.device | None = None) -> float:
    """Best rate of a matmul on this device with the threads of this process: the denominator of MFU.

    Of those in `dtype` and in fp32, as a processor without arithmetic in `dtype` is slower in it; and of square and
    oblong ones. Takes about 0.3 s for each type.
    """
    device = device or torch.device("cpu")
    return max(_best_rate(one, device) for one in dict.fromkeys((dtype, torch.float32)))


def _best_rate(dtype: torch.dtype, device: torch.device) -> float:
    """The size doubles until one matmul takes a twentieth of the time; the best of all counts, as other work on the
    machine can only slow one down.
    """
    size, best = 128, 0.0
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
    return best


def _shapes(size: int) -> tuple[tuple[int, int, int], ...]:
    """(rows, inner, columns) of matmuls with as much arithmetic: square, as into a wide layer, and out of one."""
    return (size, size, size), (size // 4, size, 4 * size), (size, 4 * size, size // 4)


def _matmul(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> Callable[[], float]:
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(columns, inner, dtype=dtype, device=device)
    return _timed(lambda: a @ b.t(), device)  # as a linear layer does it


def _timed(work: Callable[[], Tensor], device: torch.device) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(time.perf_counter() - began, 1e-9)

    return run
