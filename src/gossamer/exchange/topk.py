"""TopK: every rank sends its largest entries, values and places; exact selection.

Equations:
    S_i    = places of the k largest |x_i|,   k = max(1, round(fraction numel))
    kept_i = x_i on S_i, 0 elsewhere;   mean = sum_i w_i kept_i
Symbols: x_i (numel,) input of rank i; w_i its weight.
Wire:    GATHER of 8 k bytes (float32 value, int32 place).   State: none.   Work: one pass and a selection of ~1.2 k.
Paper:   Aji & Heafield, arXiv 1704.05021; Stich et al., arXiv 1809.07599.   Contraction: delta = k / numel.
The selection is exact, among the candidates above a sampled threshold (ops.places): 1.5 ns per element at 1%.
Good when: few entries carry the gradient, two ranks or a tiny k.   Not for: many ranks (gathering grows with n).
"""

from __future__ import annotations

from dataclasses import dataclass

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
from gossamer.ops.topk_indices import largest


@dataclass(frozen=True, slots=True)
class TopK(FractionExchange):
    """An exchange that sends the `fraction` of a bucket's entries with the largest magnitudes."""

    fraction: float = 0.01

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        flat, k = x.flat.float(), count_of(self.fraction, x.layout.numel)
        places = largest(flat, k, key_of(at, x.layout).generator(flat.device))
        (messages,) = yield Message((packed(flat, places, k),), Collective.GATHER)
        return Outcome(mean_of(messages, k, at.shares, x.layout), without(flat, places), state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Collective.GATHER, 8 * count_of(self.fraction, layout.numel), 1),)

    def contraction(self, layout: Layout) -> float | None:
        return count_of(self.fraction, layout.numel) / max(1, layout.numel)
