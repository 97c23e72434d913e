"""SampledTopK: sends the entries above a threshold estimated from a sample, at most as many as fit the message.

Equations:
    tau_i  = magnitude that about k of a sample's numbers, scaled up, reach   k = max(1, round(fraction numel))
    A_i    = places with |x_i| >= tau_i;   S_i = A_i, or k neighbors in A_i from a random one on where there are more
    kept_i = x_i on S_i, 0 elsewhere;   mean = sum_i w_i kept_i
Symbols: x_i (numel,) input of rank i; w_i its weight. The sample holds 64 numbers or more above tau, drawn by rank.
Wire:    GATHER of 8 k bytes (float32 value, int32 place), zeros where fewer are sent.   State: none.
Work:    one pass over numel.   Contraction: delta = 0.95 k / numel (the sample falls short of k by less on average).
Paper:   Lin et al., Deep Gradient Compression, arXiv 1712.01887 (threshold from a sample).
Good when: k is a tenth of numel or more, where it is half the work of topk.   Not for: tiny k: topk costs the same.
Unlike the paper: no second selection where the threshold lets too many through; feedback sends the rest later, and
what is not finite is never among the rest. Momentum correction is the optimizer's business.
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
from gossamer.comm.random_key import key_of
from gossamer.exchange._sparse import FractionExchange, count_of, mean_of, packed, without
from gossamer.ops.topk_indices import at_least, is_small, sampled_threshold


@dataclass(frozen=True, slots=True)
class SampledTopK(FractionExchange):
    """An exchange that sends at most `fraction` of a bucket's entries, those above a sampled threshold."""

    fraction: float = 0.01

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        flat, k = x.flat.float(), count_of(self.fraction, x.layout.numel)
        places = _chosen(flat, k, key_of(at, x.layout).generator(flat.device))
        (messages,) = yield Message((packed(flat, places, k),), Collective.GATHER)
        return Outcome(mean_of(messages, k, at.shares, x.layout), without(flat, places), state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Collective.GATHER, 8 * count_of(self.fraction, layout.numel), 1),)

    def contraction(self, layout: Layout) -> float | None:
        return 0.95 * count_of(self.fraction, layout.numel) / max(1, layout.numel)


def _chosen(flat: Tensor, k: int, rng: torch.Generator) -> Tensor:
    """At most k places."""
    if is_small(flat.numel(), k):
        return flat.abs().topk(k, sorted=False).indices
    found = at_least(flat, sampled_threshold(flat, k, rng, margin=2.0))
    if found.numel() <= k:
        return found
    start = int(torch.randint(found.numel(), (1,), generator=rng, device=found.device))
    turned = found.roll(-start)
    sent, left = turned[:k], turned[k:]
    sick = left[~torch.isfinite(flat[left])][:k]
    return sent if not sick.numel() else torch.cat((sick, sent[: k - sick.numel()]))
