"""Compute time of an exchange on this machine: encoding, decoding and selection, without communication."""

from __future__ import annotations

import time
from statistics import median

import torch

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups
from gossamer.exchange._compression_error import Measurable

_REPEATS = 2


_ROW = 256  # numbers that are zero together, as in a row of a table that nobody has looked up


def seconds_of(exchange: Measurable, layout: Layout, levels: ProcessGroups, rank: int) -> float:
    """Return the compute seconds of one exchange of such a bucket, as `rank` (see `turn_seconds_of`)."""
    return sum(turn_seconds_of(exchange, layout, levels, rank))


def turn_seconds_of(
    exchange: Measurable, layout: Layout, levels: ProcessGroups, rank: int, occupied: float = 1.0
) -> tuple[float, ...]:
    """Return the compute seconds of one exchange before each of its messages and after the last one.

    Runs as `rank`, with the threads of this process, on normally distributed numbers over a loopback channel, which
    answers at once; of the rows of the bucket only the fraction `occupied` is not zero. Returns the medians of two
    repeats, after a warm-up, in which the kernels of codecs are compiled.
    """
    rng = torch.Generator().manual_seed(0)
    flat = torch.randn(layout.numel, generator=rng)
    if occupied < 1.0:
        is_zero = torch.rand(-(-layout.numel // _ROW), generator=rng) >= occupied
        flat[is_zero.repeat_interleave(_ROW)[: layout.numel]] = 0.0
    flat = flat.to(layout.dtype).to(layout.device)
    state, times = exchange.init(layout), list[list[float]]()
    for step in range(_REPEATS + 1):
        outcome, turns = _exchanged(exchange, Bucket(layout, flat.clone()), state, _round(levels, rank, step))
        state = outcome.state
        times.append(turns)
    return tuple(median(one) for one in zip(*times[1:], strict=True))


def _round(levels: ProcessGroups, rank: int, step: int) -> ExchangeContext:
    ranks = sum(len(group) for group in levels.groups["all"])
    return ExchangeContext(
        rank, levels, torch.full((ranks,), 1 / ranks, dtype=torch.float64), (0, step), 1.0, accounts=False
    )


def _exchanged(
    exchange: Measurable, x: Bucket, state: ExchangeState, at: ExchangeContext
) -> tuple[Outcome, list[float]]:
    """Return the outcome of one exchange, and the seconds of its turns."""
    channel, method, turns = LoopbackChannel(at.rank, at.levels), exchange.run(x, state, at), list[float]()
    reply = None
    while True:
        began = _settled(x.flat.device)
        try:
            message = next(method) if reply is None else method.send(reply)
        except StopIteration as end:
            turns.append(_settled(x.flat.device) - began)
            outcome: Outcome = end.value
            return outcome, turns
        turns.append(_settled(x.flat.device) - began)
        reply = channel.start(message).wait()


def _settled(device: torch.device) -> float:
    """Return the time now, once a device that works behind its calls has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
