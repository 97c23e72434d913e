"""Profile one step's compute without any exchange, to learn when each gradient is complete. No result is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.model.side_effects import untouched
from gossamer.run.batches import Feed, MicroBatch, moved
from gossamer.run.step_runner import ModelRuntime

_REPEATS = 2  # after one that warms up
_WORK_REPEATS, _WORK_MATMULS = 5, 40


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The times of one rank's step.

    `ready_s`: by parameter, seconds from the start of the last backward until its gradient is complete (the end of the
    backward for a parameter without gradient). `gradients`: those of the last micro-batch, zeros for the `absent`
    parameters, on which the loss does not depend. `microbatches`: of a full step.
    """

    compute_s: float  # of a full step: every micro-batch, forward and backward
    backward_s: float  # of the last micro-batch
    ready_s: dict[str, float]
    gradients: dict[str, Tensor]
    absent: frozenset[str] = frozenset()
    microbatches: int = 1


def profile_step(engine: ModelRuntime, feed: Feed, params: Mapping[str, Tensor], step: int = 0) -> StepProfile:
    """Time the first micro-batch of `step` a few times; afterwards the model has the same state as before."""
    with untouched(engine.module, is_timed=True):
        pieces = feed.fetch(step)  # inside: items may draw from the default generators
        piece = _first(engine, pieces)
        engine.module.train()
        runs = [_once(engine, piece, params, step) for _ in range(_REPEATS + 1)][1:]
        fastest = min(runs, key=lambda one: one.compute_s)
        gradients = _gradients(engine, piece, params, step)
        absent = frozenset(n for n, p in params.items() if p.grad is None)
    return StepProfile(
        fastest.compute_s * len(pieces), fastest.backward_s, fastest.ready_s, gradients, absent, len(pieces)
    )


def pass_seconds(
    engine: ModelRuntime, feed: Feed, params: Mapping[str, Tensor], step: int = 0, *, passes: int
) -> float:
    """Return the seconds of forward and backward of the first micro-batch of `step`, the fastest of some passes.

    Afterwards the model has the same state as before.
    """
    with untouched(engine.module, is_timed=True):
        piece = _first(engine, feed.fetch(step))
        engine.module.train()
        return min(_once(engine, piece, params, step).compute_s for _ in range(passes))


def _first(engine: ModelRuntime, pieces: Mapping[int, MicroBatch]) -> MicroBatch:
    return MicroBatch(pieces[0].key, moved(pieces[0].rows, engine.device))


def _gradients(engine: ModelRuntime, piece: MicroBatch, params: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return the gradients of the last pass; in fp16 of one whose loss is scaled, as in training, by the largest factor
    under which they are finite. Without it many would be zero.
    """
    scale = engine.precision.first_scale()
    if scale.factor == 1.0:
        return {n: _gradient(p) for n, p in params.items()}
    while True:
        _once(engine, piece, params, step, factor=scale.factor)
        found = {n: _gradient(p) / scale.factor for n, p in params.items()}
        if scale.factor == 1.0 or all(bool(torch.isfinite(g).all()) for g in found.values()):
            return found
        scale = engine.precision.next_scale(scale, finite=False)


def _gradient(param: Tensor) -> Tensor:
    """Return the gradient as a bucket holds it: zeros where there is none, and all rows of a sparse one."""
    if param.grad is None:
        return torch.zeros_like(param)
    return param.grad if param.grad.layout == torch.strided else param.grad.to_dense()


def encode_slowdown() -> float:
    """Return how much a second busy thread slows the first: 0 if each has a core, 1 (twice the time) if they share one.

    All ranks must measure at the same time, because their threads will compete likewise during training.
    """
    alone = _work_s()
    busy, stop = threading.Event(), threading.Event()
    other = threading.Thread(target=_encode_until, args=(stop, busy), name="gossamer-rehearsal")
    other.start()
    try:
        busy.wait()
        together = _work_s()
    finally:
        stop.set()
        other.join()
    return min(1.0, max(0.0, together / alone - 1.0))


def _work_s() -> float:
    """Return the seconds of a fixed amount of matmuls, as in a backward pass; the median of a few runs."""
    a, times = torch.ones(256, 256), []
    for _ in range(_WORK_REPEATS):
        began = time.perf_counter()
        for _ in range(_WORK_MATMULS):
            a @ a
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _encode_until(stop: threading.Event, busy: threading.Event) -> None:
    x = torch.ones(1 << 20)
    while not stop.is_set():
        (x * 0.5).round_()
        busy.set()


def _once(
    engine: ModelRuntime, piece: MicroBatch, params: Mapping[str, Tensor], step: int, *, factor: float = 1.0
) -> StepProfile:
    """Return the times of forward and backward, with the loss times `factor`."""
    for param in params.values():
        param.grad = None
    ready: dict[str, float] = {}
    began = time.perf_counter()
    loss = torch.nan_to_num(engine.loss(piece.rows, step=step, key=piece.key))
    _settle(engine.device)
    turned = time.perf_counter()
    hooks = [
        p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call, attr-defined]
            lambda _, n=n: ready.__setitem__(n, time.perf_counter() - turned)
        )
        for n, p in params.items()
    ]
    try:
        with engine.randomness.at(step, piece.key):
            (loss * factor).backward()  # type: ignore[no-untyped-call]
        _settle(engine.device)
    finally:
        for hook in hooks:
            hook.remove()
    ended = time.perf_counter()
    return StepProfile(ended - began, ended - turned, {n: ready.get(n, ended - turned) for n in params}, {})


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
