"""TopK: every rank sends its largest entries, values and places; exact selection.

Equations:
    S_i    = places of the k largest |x_i|,   k = max(1, round(fraction numel))
    kept_i = x_i on S_i, 0 elsewhere;   mean = sum_i w_i kept_i
Symbols: x_i (numel,) input of rank i; w_i its weight.
Wire:    GATHER of 8 k bytes (float32 value, int32 place).   State: none.   Work: a selection over numel.
Paper:   Aji & Heafield, arXiv 1704.05021; Stich et al., arXiv 1809.07599.   Contraction: delta = k / numel.
Good when: few entries carry the gradient, two ranks or a tiny k.   Not for: many ranks (gathering grows with n), or
links above about 3 Gbit/s (exact selection costs 11 ns per element: see sampled_topk).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gossamer.compress import Exchange, Traits
from gossamer.ops.pack import pack, unpack
from gossamer.spec.errors import bad_input
from gossamer.wire.bucket import Bucket, Layout
from gossamer.wire.message import Combine, Levels, Message, Outcome, Round, Rounds, State, Traffic


@dataclass(frozen=True, slots=True)
class TopK(Exchange):
    """`fraction` of a bucket's entries is sent."""

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise bad_input(wanted="0 < fraction <= 1", got=repr(self.fraction), do="give 0.01", key="fraction")

    @property
    def traits(self) -> Traits:
        return Traits()

    def init(self, layout: Layout) -> State:
        return State()

    def run(self, x: Bucket, state: State, at: Round) -> Rounds:
        k, flat = self._count(x.layout), x.flat.float()
        places = flat.abs().topk(k, sorted=False).indices
        (messages,) = yield Message((pack(flat[places], places.int()),), Combine.GATHER)
        mean, kept = torch.zeros_like(flat), torch.zeros_like(flat)
        for message, share in zip(messages, at.shares, strict=True):
            values, where = unpack(message, ((k, torch.float32), (k, torch.int32)))
            mean.index_add_(0, where, values, alpha=share)
        kept[places] = flat[places]
        return Outcome(mean.to(x.layout.dtype), kept, state)

    def traffic(self, layout: Layout, levels: Levels, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Combine.GATHER, 8 * self._count(layout), 1),)

    def contraction(self, layout: Layout) -> float | None:
        return self._count(layout) / max(1, layout.numel)

    def _count(self, layout: Layout) -> int:
        return min(layout.numel, max(1, round(self.fraction * layout.numel)))
