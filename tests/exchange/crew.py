"""Making buckets and running exchanges, for the tests of compress: in lockstep, or over gloo in the pool."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups
from gossamer.exchange import Exchange
from pool import Seat

SHAPES = {"w": (24, 16), "bias": (24,), "scalar": (), "none": (0,), "conv": (4, 3, 3, 3), "wide": (7, 61)}


INT8 = {"two_shot": {"codec": "int8"}}
NESTED = {
    "powersgd of int8": {"powersgd": {"rank": 2, "p_exchange": INT8}},
    "acp_sgd of int8": {"acp_sgd": {"rank": 2, "factor_exchange": INT8}},
    "powersgd of int8 twice": {"powersgd": {"rank": 2, "p_exchange": INT8, "q_exchange": INT8}},
}


def example(name: str) -> Exchange:
    """A method with its defaults; one that wraps another gets a cheap inner one. Or one of NESTED."""
    if name in NESTED:
        return exchange_methods.build(NESTED[name])
    given: dict[str, Any] = {}
    for f in fields(exchange_methods.REGISTRY.type(name)):
        if f.default is MISSING and f.default_factory is MISSING:
            given[f.name] = "int8" if f.type in ("Codec",) else {"topk": {"fraction": 0.25}}
    return exchange_methods.build({name: given} if given else name)


def layout(shapes: Mapping[str, Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout.of({name: torch.empty(tuple(shape), dtype=dtype) for name, shape in shapes.items()})


def bucket(where: Layout, rank: int, step: int = 0) -> Bucket:
    """Different numbers on every rank and step."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return Bucket(where, torch.randn(where.numel, generator=rng).to(where.dtype))


def levels_of(ranks: int) -> ProcessGroups:
    """One flat level, and islands of two for the methods that know them."""
    return ProcessGroups.islands([list(range(i, min(i + 2, ranks))) for i in range(0, ranks, 2)])


def weights(ranks: int) -> Tensor:
    parts = torch.arange(1.0, ranks + 1, dtype=torch.float64)
    return parts / parts.sum()


def at(rank: int, ranks: int, step: int = 0, lr: float = 0.1, levels: ProcessGroups | None = None) -> ExchangeContext:
    return ExchangeContext(rank, levels or levels_of(ranks), weights(ranks), (11, step), lr)


def world(
    one: Exchange, ranks: int, inputs: Sequence[Bucket], states: Sequence[ExchangeState], step: int = 0, lr: float = 0.1
):
    """One exchange of all ranks in lockstep: (outcomes, channels)."""
    channels = LocalChannel.world(ranks, levels_of(ranks))
    methods = [one.run(inputs[r], states[r], at(r, ranks, step, lr)) for r in range(ranks)]
    return run_lockstep(channels, methods), channels


def kept(given: Tensor, outcome: Outcome) -> Tensor:
    """The part of what a rank had given that the mean accounts for."""
    return given if outcome.lost is None else given - outcome.lost


def steps_in_lockstep(one: Exchange, ranks: int, steps: int, where: Layout) -> list[list[Outcome]]:
    """Outcomes [step][rank] of consecutive exchanges."""
    states, found = [one.init(where) for _ in range(ranks)], []
    for step in range(steps):
        outcomes, _ = world(one, ranks, [bucket(where, r, step) for r in range(ranks)], states, step)
        states = [o.state for o in outcomes]
        found.append(outcomes)
    return found


def over_gloo(seat: Seat, *, name: str, steps: int, buckets: int) -> dict[str, Any]:
    """The same exchanges through the pump, buckets arriving in another order on every rank; what came out, as lists."""
    one, where, levels = example(name), layout(), levels_of(seat.ranks)
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=20.0))
    pump = CommThread(channel)
    rounds = [len(one.traffic(where, levels, seat.rank))] * buckets
    states = [one.init(where) for _ in range(buckets)]
    means: list[list[float]] = []
    for step in range(steps):
        began = pump.begin(rounds)
        order = list(range(buckets))
        random.Random(100 * seat.rank + step).shuffle(order)
        for b in order:
            x = bucket(where, seat.rank, step * buckets + b)
            began.submit(b, one.run(x, states[b], at(seat.rank, seat.ranks, step)))
        outcomes = [began.result(b) for b in range(buckets)]
        states = [o.state for o in outcomes]
        means += [o.mean.tolist() for o in outcomes]
    pump.close()
    sent = channel.meter.snapshot()
    channel.close()
    return {"means": means, "sent": sent, "states": [{k: t.flatten().tolist() for k, t in s.flatten()} for s in states]}
