"""Jobs of the pool: a head whose words are shared out over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gossamer.ops.cut_cross_entropy import HeadLoss, LogitMap, VocabularyShard, cut_cross_entropy
from pool import Seat

TOKENS, WORDS, WIDTH, FIRST = 40, 101, 24, 37  # the first rank has so many of the words


def made() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight, bias = torch.randn(WORDS, WIDTH, generator=generator), torch.randn(WORDS, generator=generator)
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    labels[::7] = -100
    return hidden, weight, labels, bias


def settings(shard: VocabularyShard | None = None) -> HeadLoss:
    return HeadLoss(logits=LogitMap(inner=0.2, is_capped=True, outer=5.0), tile=(16, 10), shard=shard)


def sharded(seat: Seat) -> dict[str, Any]:
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        hidden, weight, labels, bias = made()
        words = slice(0, FIRST) if seat.rank == 0 else slice(FIRST, WORDS)
        shard = VocabularyShard(
            first=words.start,
            maximum=lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
            total=lambda x: dist.all_reduce(x),
        )
        leaves = [one.clone().requires_grad_() for one in (hidden, weight[words], bias[words])]
        loss = cut_cross_entropy(leaves[0], leaves[1], labels, leaves[2], head=settings(shard))
        found = torch.autograd.grad(loss, leaves)
        return {"loss": loss.item(), "gradients": [one.tolist() for one in found]}
    finally:
        dist.destroy_process_group()
