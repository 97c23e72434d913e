"""What pool workers run for claims about parameters by rows: a model in units learns to continue some numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import exchange as exchange_methods
from gossamer import optimizer as optimizer_methods
from gossamer import sharding as sharding_methods
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.sharding import ShardedOptimizer, ShardedParameters, UnshardOrder
from gossamer.sync import GradientReducer, StepContext, StepVote
from pool import Seat

WIDTH, BLOCKS, WORDS, ROWS = 64, 4, 64, 4
UNITS = ("embed", *(f"blocks.{i}" for i in range(BLOCKS)), "head")


class Model(nn.Module):
    """All units in a row, none of them tied; of every parameter as many rows as four ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(module: nn.Module, number: int, seat: Seat) -> Tensor:
    """Of this rank's rows of micro-batch `number` of all."""
    drawn = torch.Generator().manual_seed(number)
    starts = torch.randint(0, WORDS, (seat.ranks, ROWS, 1), generator=drawn)[seat.rank]
    ids = (starts + 3 * torch.arange(17)) % WORDS
    return nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def learn(seat: Seat, *, states: Any, islands: list[list[int]], microbatches: int, steps: int = 3) -> dict[str, Any]:
    """This rank's losses; numbers of the model and of its units in their order; bytes that it has sent in a step, by
    link.
    """
    torch.manual_seed(0)
    module = Model()
    sizes = [sum(p.numel() for p in module.get_submodule(unit).parameters()) for unit in UNITS]
    levels, sharding = ProcessGroups.islands(islands), sharding_methods.build(states)
    deal = sharding.deal(levels)
    both = (
        levels.and_more(ProcessGroups({sharding_methods.LEVEL: levels.groups[deal.path[0]]})) if deal.path else levels
    )
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, both, interface="lo", timeout_s=20.0))
    pump, beside = CommThread(channel), CommThread(channel)
    params, shards = dict(module.named_parameters()), None
    if sharding.takes_parameters:
        shards = ShardedParameters.of(
            module, UnshardOrder.of(module, UNITS), beside, deal=deal.of_parameters, rank=seat.rank
        )
    rule = optimizer_methods.build({"adamw": {"lr": 3e-3, "weight_decay": 0.0}})
    mine = sharding_methods.holdings(deal, sharding_methods.shapes_of(params), seat.rank)
    held = ShardedOptimizer.of(
        rule, params, deal, rank=seat.rank, holdings=mine, differences=sharding.differences, shards=shards
    )
    replica = GradientReducer(
        params,
        sharding.exchange(exchange_methods.build("dense"), deal.path),
        pump,
        bucket_bytes=1 << 20,
        holdings=mine,
        gives_back=sharding.gives_back,
    )
    losses, sent = [], Counter[str]()
    for step in range(steps):
        before = Counter(channel.meter.snapshot())
        replica.open(StepContext(step, 0, 1.0, 1.0))
        for number in range(microbatches):
            if number == microbatches - 1:
                replica.watch()
            loss = loss_of(module, step * microbatches + number, seat)
            (loss / microbatches).backward()
        replica.reduce()
        assert replica.agree(StepVote(float(loss.detach()))).finite
        replica.commit()
        held.update(replica.gradients(), lr_scale=1.0, step=step)
        held.gather(replica.layouts, pump, key=(0, step))
        losses.append(float(loss.detach()))
        sent = Counter(channel.meter.snapshot()) - before
    replica.close()
    for one in (pump, beside):
        one.close()
    channel.close()
    return {"losses": losses, "sizes": sizes, "sent": dict(sent)}
