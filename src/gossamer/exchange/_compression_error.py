"""Compression error and bytes of an exchange, measured on a gradient, for adaptive compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, as_float
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ExchangeContext, ExchangeState, ProcessGroups, Rounds, Traffic
from gossamer.spec.method_config import Written
from gossamer.spec.statistics import Statistics

_ALONE = ProcessGroups.islands([[0]])  # every level an exchange may ask for, with one rank in it


class Measurable(Protocol):
    """The part of the exchange interface that a measurement needs."""

    def init(self, layout: Layout) -> ExchangeState:
        """Return the state before the first exchange."""

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        """Run one exchange of a bucket."""

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        """Return the messages that `rank` sends."""


def error_of(
    exchange: Measurable, x: Tensor, *, name: str = "x", key: tuple[int, int] = (0, 0), warm: int = 0
) -> float:
    """Return |x - mean| of an exchange with a single rank: the error of all its encodings together. `x` is not changed.

    A method with state is measured at its first step. `warm` exchanges of the same `x` run before, for methods that
    refine their messages from their state (PowerSGD's power iteration). Do not use them with error feedback, which
    would send its residual.
    """
    return errors_of(exchange, {name: x}, key=key, warm=warm)[name]


def errors_of(
    exchange: Measurable, tensors: Mapping[str, Tensor], *, key: tuple[int, int] = (0, 0), warm: int = 0
) -> dict[str, float]:
    """Return `error_of` of each tensor, where all of them share one bucket; they have one dtype and device."""
    flat = torch.cat([x.detach().reshape(-1).float() for x in tensors.values()])
    layout = as_float(Layout.of(tensors))
    state = exchange.init(layout)
    for step in range(warm + 1):
        at = ExchangeContext(0, _ALONE, torch.ones(1, dtype=torch.float64), (key[0], key[1] + step), 1.0)
        (outcome,) = run_lockstep(
            LocalChannel.world(1, _ALONE), [exchange.run(Bucket(layout, flat.clone()), state, at)]
        )
        state = outcome.state
    lost = Bucket(layout, flat - outcome.mean.float()).slices()
    return {name: float(torch.linalg.vector_norm(part, dtype=torch.float64)) for name, part in lost}


def bytes_of(exchange: Measurable, layout: Layout, levels: ProcessGroups, rank: int = 0) -> int:
    """Return the bytes that `rank` sends to all others together in one exchange."""
    channel = CountingChannel(rank, levels)
    channel.charge(exchange.traffic(layout, levels, rank))
    return channel.meter.total_bytes


def measure(
    candidates: Sequence[tuple[Written, Measurable]],
    gradients: Mapping[str, Tensor],
    levels: ProcessGroups,
    *,
    key: tuple[int, int] = (0, 0),
    warm: int = 0,
) -> Statistics:
    """Measure every candidate on every gradient, each by itself. `gradients` are means: the same on all ranks."""
    layouts = {name: Layout.of({name: g}) for name, g in gradients.items()}
    return Statistics(
        names=tuple(gradients),
        numel=tuple(g.numel() for g in gradients.values()),
        candidates=tuple(written for written, _ in candidates),
        error=tuple(
            tuple(error_of(one, g, name=name, key=key, warm=warm) for _, one in candidates)
            for name, g in gradients.items()
        ),
        nbytes=tuple(tuple(bytes_of(one, where, levels) for _, one in candidates) for where in layouts.values()),
    )
