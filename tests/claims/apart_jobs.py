"""What pool workers run for claims about islands that train apart: a small network learns to continue real text."""

from __future__ import annotations

import argparse
import inspect
import logging
import typing
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import exchange as exchange_methods
from gossamer import optimizer as optimizer_methods
from gossamer import sharding as sharding_methods
from gossamer import sync
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.sync import GradientReducer, LocalStep, StepContext, StepVote, outer_loop_of
from pool import Seat

CONTEXT, HELD_OUT = 8, 4000


@cache
def text() -> Tensor:
    """Some 300 kB of Python that everybody has, as bytes."""
    source = "".join(map(inspect.getsource, (argparse, logging, inspect, typing)))
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()


class Next(nn.Module):
    """The next byte from the last eight: three layers of about 8000 parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.first, self.last = nn.Linear(32 * CONTEXT, 32), nn.Linear(32, 256)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(self.embed(rows).flatten(1))))


def loss_at(model: Next, places: Tensor) -> Tensor:
    """Mean over the bytes that follow `places`."""
    rows = text()[places[:, None] + torch.arange(CONTEXT)]
    return nn.functional.cross_entropy(model(rows), text()[places + CONTEXT])


def learn(
    seat: Seat,
    *,
    written: Any,
    steps: int,
    rule: Any,
    exchange: Any = "dense",
    states: Any = "none",
    batch: int = 32,
    islands: list[list[int]] | None = None,
    warm: int = 0,
) -> dict[str, Any]:
    """Train; every rank has a part of the text of its own. Rates rise in `warm` steps and fall to nothing. The loss
    on text that nobody has seen, of what all agree on in the end; bytes sent by this rank, per step and by link.
    """
    torch.manual_seed(0)
    model = Next()
    params = dict(model.named_parameters())
    levels = ProcessGroups.islands(islands or [[r] for r in range(seat.ranks)]).twice()
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=20.0))
    pump, beside = CommThread(channel), CommThread(channel)
    method, update = sync.build(written), optimizer_methods.build(rule)
    meets = "all" if method.loop is None else "island"
    sharding = sharding_methods.build(states)
    deal = sharding.deal(levels)
    mine = sharding_methods.holdings(deal, sharding_methods.shapes_of(params), seat.rank)
    held = sharding_methods.ShardedOptimizer.of(
        update, params, deal, rank=seat.rank, holdings=mine, differences=sharding.differences
    )
    meet = sharding.exchange(exchange_methods.build(exchange), deal.path)
    replica = GradientReducer(params, meet, pump, bucket_bytes=1 << 20, meets=meets, holdings=mine)
    truth = {name: p.detach() for name, p in params.items()}
    apart = outer_loop_of(
        method.loop, params, truth, replica, beside, units=("embed", "first", "last"), bucket_bytes=1 << 20
    )
    part = (len(text()) - HELD_OUT - CONTEXT) // seat.ranks
    drawn = torch.Generator().manual_seed(seat.rank)
    sent = []
    for step in range(steps):
        before = channel.meter.total_bytes
        factor = min(1.0, (step + 1) / max(1, warm)) * (1 - step / steps) * apart.factor
        replica.open(StepContext(step, 0, factor, float(batch), level=method.level(step)))
        replica.watch()
        places = seat.rank * part + torch.randint(0, part, (batch,), generator=drawn)
        loss_at(model, places).backward()
        replica.reduce()
        assert replica.agree(StepVote(0.0)).finite
        replica.commit()
        held.update(replica.gradients(), lr_scale=factor, step=step, apart=method.level(step) != "all")
        held.gather(replica.layouts, pump, key=(0, step))
        for landed in apart.after(LocalStep(step + 1, factor * update.lr, float(batch), 0, last=step == steps - 1)):
            held.meet(landed.moved, rates=landed.rates)
        if method.loop is not None:
            apart.settle(step + 1)
        sent.append(channel.meter.total_bytes - before)
    with torch.no_grad():
        loss = float(loss_at(model, len(text()) - HELD_OUT - CONTEXT + torch.arange(HELD_OUT)))
    links = channel.meter.snapshot()
    replica.close()
    for one in (pump, beside):
        one.close()
    channel.close()
    drift = max(
        (
            float((main - held.own(name, truth[name])).abs().max())
            for slot, name, _, main in held.slots()
            if slot == "main"
        ),
        default=0.0,
    )
    first = float(truth["first.weight"].double().sum())
    found = {"loss": loss, "sent": sent, "links": links, "drift": drift, "first": first}
    if not held.is_sharded:
        found["kept"] = sum(float(tensor.double().sum()) for *_, tensor in held.slots())
    return found
