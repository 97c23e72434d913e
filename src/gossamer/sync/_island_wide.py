"""Displacements of islands: one exchange among all ranks, for which the ranks of an island speak together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gossamer.compress import Exchange, Traits
from gossamer.compress.hierarchical import Hierarchical
from gossamer.wire.bucket import Bucket, Layout
from gossamer.wire.message import Combine, Levels, Message, Round, Rounds, State, Traffic


def among_all(exchange: Exchange, levels: Levels, *, keeps: bool) -> Exchange:
    """`exchange` as all ranks run it: those of one island hold the same. `keeps`: whether what an island lost will stay
    with it, and so must be the same on all its ranks.
    """
    if all(len(island) == 1 for island in levels.groups["island"]):
        return exchange
    wide = exchange if isinstance(exchange, Hierarchical) else Hierarchical(exchange)
    return IslandWide(wide) if keeps else wide


@dataclass(frozen=True, slots=True)
class IslandWide(Exchange):
    """Around an exchange over islands: what is lost is the island's, and not that of the rank that spoke for it.

    lost <- sum_{i in I} (w_i / W_I) lost_i, W_I = sum of w_i over I: one SUM of float32 inside the island more.
    """

    inner: Exchange

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def init(self, layout: Layout) -> State:
        return self.inner.init(layout)

    def run(self, x: Bucket, state: State, at: Round) -> Rounds:
        out = yield from self.inner.run(x, state, at)
        lost = torch.zeros_like(out.mean, dtype=torch.float32) if out.lost is None else out.lost
        mine = at.weights[list(at.levels.group("island", at.rank))]
        share = at.share / float(mine.sum()) if float(mine.sum()) > 0 else 1 / len(mine)
        (total,) = yield Message((lost.mul_(share),), Combine.SUM, "island")
        return replace(out, lost=total)

    def traffic(self, layout: Layout, levels: Levels, rank: int) -> tuple[Traffic, ...]:
        return (*self.inner.traffic(layout, levels, rank), Traffic(Combine.SUM, layout.numel, 4, "island"))

    def check(self, layout: Layout, levels: Levels) -> None:
        self.inner.check(layout, levels)
