"""The loss of a large vocabulary and its gradients: N tokens, V words, D wide, in float32, forward and backward.

Peak: the largest sum of what torch's allocator gives and takes from the start of forward to the end of backward, from
the memory records of torch.profiler; the hidden states, the head and the labels are there before, their gradients are
counted. Seconds: medians of repeats in turns, on one thread, without the profiler. `details`: the ratios to the plain
loss, and how far loss and gradients are from it, relative to the largest. Liger runs on CUDA alone: left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gossamer.ops.cut_cross_entropy import cut_bytes, cut_cross_entropy
from savers import Row
from savers._allocator import allocator_peak

TOKENS, QUICK_TOKENS, WORDS, WIDTH = 4096, 1024, 65_536, 256
REPEATS, QUICK_REPEATS = 5, 3
NOT_QUICK = f"{TOKENS} tokens: quick takes {QUICK_TOKENS}, and torch's loss with its own choice of chunks is left out"
CHUNK = 512  # of torch's loss: with its own choice of a few tokens it takes more than ten times as long on a CPU

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch(**chunks: Any) -> Way:
    options = torch.nn.LinearCrossEntropyOptions(**chunks)
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=options)


def _ways(*, quick: bool) -> dict[tuple[str, str], Way]:
    """Return what is measured, by method and peer."""
    ways: dict[tuple[str, str], Way] = {
        ("plain", "F.cross_entropy"): lambda hidden, weight, labels: F.cross_entropy(hidden @ weight.t(), labels),
        ("gradients in forward", ""): lambda hidden, weight, labels: cut_cross_entropy(
            hidden, weight, labels, in_forward=True
        ),
        ("gradients in backward", ""): cut_cross_entropy,
    }
    if hasattr(F, "linear_cross_entropy"):
        chunks = {"batch_chunk_size": CHUNK, "chunking_method": None}
        ways["gradients in forward", f"torch, chunks of {CHUNK}"] = _torch(**chunks)
        if not quick:
            ways["gradients in forward", "torch, its own chunks"] = _torch()
    return ways


def rows(*, quick: bool = False) -> Iterator[Row]:
    tokens, repeats = (QUICK_TOKENS, QUICK_REPEATS) if quick else (TOKENS, REPEATS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _measured(_ways(quick=quick), tokens, repeats)
    finally:
        torch.set_num_threads(threads)


def _measured(ways: dict[tuple[str, str], Way], tokens: int, repeats: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator) * 0.02
    labels = torch.randint(WORDS, (tokens,), generator=generator)
    known: dict[tuple[str, str], list[Tensor]] = {}
    peaks = {}
    for name, way in ways.items():  # also warms up
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            known[name] = _step(way, hidden, weight, labels)
        peaks[name] = allocator_peak(seen)
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            _step(way, hidden, weight, labels)
            seconds[name].append(time.perf_counter() - began)
    plain = next(iter(ways))
    gradients = 4 * (tokens + WORDS) * WIDTH
    for name, times in seconds.items():
        method, peer = name
        ratios = sorted(a / b for a, b in zip(times, seconds[plain], strict=True))
        ours = cut_bytes(tokens, WORDS, in_forward=method.endswith("forward"), makes_weight=True)
        off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(known[name], known[plain], strict=True)]
        yield Row(
            method=f"cut_cross_entropy, {method}" if method != "plain" else "plain loss",
            peer=peer,
            setting=f"{tokens} tokens, {WORDS} words, width {WIDTH}, fp32, 1 thread; peak from the allocator's records "
            "in torch.profiler, gradients included",
            peak_bytes=peaks[name],
            planned_peak_bytes=None if peer else gradients + ours,
            step_s=round(median(times), 4),
            loss=round(float(known[name][0]), 6),
            details={
                "peak_of_plain": round(peaks[name] / peaks[plain], 4),
                "time_of_plain": round(median(ratios), 4),
                "time_of_plain_pairs": [round(one, 4) for one in ratios],
                "off": dict(zip(("loss", "hidden", "head"), (float(f"{one:.2g}") for one in off), strict=True)),
            },
        )


def _step(way: Way, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the loss and its gradients."""
    leaves = [one.detach().requires_grad_() for one in (hidden, weight)]
    loss = way(leaves[0], leaves[1], labels)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]
