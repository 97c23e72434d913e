"""A rehearsal: one step's compute without exchange, to learn when which gradient is complete. Nothing is kept of it."""

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
    """This rank's times. `ready_s`, by parameter: after the last backward began, its gradient was complete (a parameter
    without gradient is ready at its end). `gradients` are those of the last micro-batch.
    """

    compute_s: float  # of a whole step: every micro-batch, forward and backward
    backward_s: float  # of the last micro-batch
    ready_s: dict[str, float]
    gradients: dict[str, Tensor]


def profile_step(engine: ModelRuntime, feed: Feed, params: Mapping[str, Tensor], step: int = 0) -> StepProfile:
    """Compute the first micro-batch of `step` some times; the model is afterwards as it was in all it keeps."""
    pieces = feed.fetch(step)
    piece = MicroBatch(pieces[0].key, moved(pieces[0].rows, engine.device))
    with untouched(engine.module, is_timed=True):
        engine.module.train()
        runs = [_once(engine, piece, params, step) for _ in range(_REPEATS + 1)][1:]
        fastest = min(runs, key=lambda one: one.compute_s)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
    return StepProfile(fastest.compute_s * len(pieces), fastest.backward_s, fastest.ready_s, gradients)


def encode_slowdown() -> float:
    """The part of its time that a second thread takes from the first, from 0 (each has a core) to 1 (they share one).

    All ranks must measure at the same time: they will share what they share.
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
    """Seconds of a fixed amount of what a backward pass does; the median of a few."""
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


def _once(engine: ModelRuntime, piece: MicroBatch, params: Mapping[str, Tensor], step: int) -> StepProfile:
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
            loss.backward()  # type: ignore[no-untyped-call]
        _settle(engine.device)
    finally:
        for hook in hooks:
            hook.remove()
    ended = time.perf_counter()
    return StepProfile(ended - began, ended - turned, {n: ready.get(n, ended - turned) for n in params}, {})


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
