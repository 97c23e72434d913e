"""RandomK: entries at random places that all ranks draw alike, so that values alone are sent and can be summed.

Equations:
    S    = {(r + u_j) mod numel : u_j uniform in the j-th of k equal parts of [0, numel)},   r uniform
    kept_i = a x_i on S, 0 elsewhere;   mean = sum_i w_i kept_i;   a = numel / k with `unbiased`, else 1
Symbols: x_i (numel,) input of rank i; w_i its weight; k = max(1, round(fraction numel)); r, u_j from the shared key.
Wire:    SUM of k float32.   State: none.   Work: k random reads.
Paper:   Stich et al., arXiv 1809.07599; Wangni et al., arXiv 1710.09854.   Contraction: delta = k / numel (a = 1).
Good when: compute is scarce, or the gradient has no few large entries.   Not for: gradients that have them (see topk).
Unlike the paper: one place in each of k equal parts, turned by a random amount. Every place is as likely as in the
uniform choice, k / numel, so is its bias; places are distinct without a permutation, and mostly in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import (
    Collective,
    ExchangeContext,
    ExchangeState,
    Message,
    Outcome,
    ProcessGroups,
    Rounds,
    Traffic,
)
from gossamer.comm.random_key import Key, key_of
from gossamer.exchange._sparse import FractionExchange, count_of


@dataclass(frozen=True, slots=True)
class RandomK(FractionExchange):
    """An exchange that sends `fraction` of a bucket's entries, scaled for an unbiased mean with `unbiased`."""

    fraction: float = 0.01
    unbiased: bool = False

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        flat, k = x.flat.float(), count_of(self.fraction, x.layout.numel)
        places = drawn(x.layout.numel, k, key_of(at, x.layout), flat.device)
        values = flat[places].mul_(flat.numel() / k if self.unbiased and k else 1.0)
        (total,) = yield Message((values * at.share,), Collective.SUM)
        lost = flat.index_add(0, places, values, alpha=-1)
        mean = torch.zeros_like(flat).index_copy_(0, places, total)
        return Outcome(mean.to(x.layout.dtype), lost, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Collective.SUM, count_of(self.fraction, layout.numel), 4),)

    def contraction(self, layout: Layout) -> float | None:
        part = count_of(self.fraction, layout.numel) / max(1, layout.numel)
        if not self.unbiased or part == 0:
            return part
        left = 2 - 1 / part  # E|lost|^2 = (1 / part - 1) |x|^2
        return left if left > 0 else None


def drawn(numel: int, k: int, key: Key, device: torch.device) -> Tensor:
    """Return k distinct indices of `numel`, the same on every rank, each with equal probability."""
    if k == numel:
        return torch.arange(numel, device=device)
    rng = key.agreed(device)
    starts = torch.arange(k + 1, device=device).mul_(numel).div_(k, rounding_mode="floor")
    parts = starts.diff()
    inside = torch.rand(k, generator=rng, dtype=torch.float64, device=device).mul_(parts).long()
    turn = torch.randint(numel, (1,), generator=rng, device=device)
    return starts[:-1].add_(inside).add_(turn).remainder_(numel)
