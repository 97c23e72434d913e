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


def seconds_of(exchange: Measurable, layout: Layout, levels: ProcessGroups, rank: int) -> float:
    """Return the compute seconds of one exchange of such a bucket, as `rank`, with the threads of this process.

    Runs on normally distributed numbers over a loopback channel, which answers at once. Returns the median of two
    repeats, after a warm-up.
    """
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)).to(layout.dtype).to(layout.device)
    state, times = exchange.init(layout), []
    for step in range(_REPEATS + 1):
        x = Bucket(layout, flat.clone())
        began = time.perf_counter()
        state = _exchanged(exchange, x, state, _round(levels, rank, step)).state
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _round(levels: ProcessGroups, rank: int, step: int) -> ExchangeContext:
    ranks = sum(len(group) for group in levels.groups["all"])
    return ExchangeContext(
        rank, levels, torch.full((ranks,), 1 / ranks, dtype=torch.float64), (0, step), 1.0, accounts=False
    )


def _exchanged(exchange: Measurable, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Outcome:
    channel, method = LoopbackChannel(at.rank, at.levels), exchange.run(x, state, at)
    try:
        message = next(method)
        while True:
            message = method.send(channel.start(message).wait())
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
