"""What a laboratory's host runs for the comparison of sharded parameters with torch's fully_shard: the same steps of
the same model both ways. One JSON line: losses, and what the interface has sent for gathers and for gradients, per way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from gossamer import exchange as exchange_methods
from gossamer import optimizer as optimizer_methods
from gossamer import sharding as sharding_methods
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.sync import GradientReducer, StepContext, StepVote

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH, BLOCKS, STEPS, LR = 128, 4, 4, 3e-3
UNITS = ("embed", *(f"blocks.{i}" for i in range(BLOCKS)), "head")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(module: nn.Module, step: int) -> Tensor:
    """Of this rank's four rows."""
    ids = torch.randint(0, 64, (RANKS, 4, 16), generator=torch.Generator().manual_seed(step))[RANK]
    return nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def fresh() -> Model:
    torch.manual_seed(0)
    return Model()


def sent(work: Callable[[], object]) -> int:
    """Bytes that left this host's interface meanwhile."""
    dist.barrier()
    before = _sent_so_far()
    work()
    dist.barrier()
    return _sent_so_far() - before


def _sent_so_far() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def stock() -> dict[str, object]:
    module = fresh()
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    rule = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []

    def step() -> None:
        loss = loss_of(module, len(losses))
        loss.backward()
        rule.step()
        rule.zero_grad()
        losses.append(float(loss.detach()))

    for _ in range(STEPS - 1):
        step()
    whole = sent(step)
    module.set_requires_gradient_sync(False)
    gathers = sent(lambda: loss_of(module, 0).backward())
    return {"losses": losses, "gathers": gathers, "gradients": whole - gathers}


def ours() -> dict[str, object]:
    module = fresh()
    levels = ProcessGroups({"all": (tuple(range(RANKS)),), sharding_methods.LEVEL: (tuple(range(RANKS)),)})
    store = dist.PrefixStore("ours", dist.distributed_c10d._get_default_store())
    channel = ProcessGroupChannel(Rendezvous(store, RANK, levels, interface=os.environ["GLOO_SOCKET_IFNAME"]))
    pump, beside = CommThread(channel), CommThread(channel)
    params = dict(module.named_parameters())
    sharding = sharding_methods.build("zero3")
    deal = sharding.deal(levels)
    shards = sharding_methods.ShardedParameters.of(
        module, sharding_methods.UnshardOrder.of(module, UNITS), beside, deal=deal.of_parameters, rank=RANK
    )
    rule = optimizer_methods.build({"adamw": {"lr": LR, "weight_decay": 0.0}})
    mine = sharding_methods.holdings(deal, sharding_methods.shapes_of(params), RANK)
    states = sharding_methods.ShardedOptimizer.of(
        rule, params, deal, rank=RANK, holdings=mine, differences=None, shards=shards
    )
    gathers = sent(lambda: loss_of(module, 0).backward())
    states.release()
    replica = GradientReducer(
        params,
        sharding.exchange(exchange_methods.build("dense"), deal.path),
        pump,
        bucket_bytes=1 << 20,
        holdings=mine,
        gives_back=sharding.gives_back,
    )
    losses: list[float] = []

    def step() -> None:
        number = len(losses)
        replica.open(StepContext(number, 0, 1.0, 60.0))
        replica.watch()
        loss = loss_of(module, number)
        loss.backward()
        replica.reduce()
        assert replica.agree(StepVote(float(loss.detach()))).finite
        replica.commit()
        states.update(replica.gradients(), lr_scale=1.0, step=number)
        losses.append(float(loss.detach()))

    for _ in range(STEPS - 1):
        step()
    whole = sent(step)
    replica.close()
    for one in (pump, beside):
        one.close()
    channel.close()
    return {"losses": losses, "gathers": gathers, "gradients": whole - gathers}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps({"stock": stock(), "ours": ours()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
