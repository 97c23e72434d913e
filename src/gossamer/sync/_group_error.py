"""Exchange of pseudo-gradients between islands, in which the ranks of one island act as one."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange.hierarchical import Hierarchical


def among_all(exchange: Exchange, levels: ProcessGroups, *, keeps: bool) -> Exchange:
    """Return `exchange` as all ranks run it, where the ranks of one island hold the same tensors.

    `keeps`: make the compression error equal on all ranks of an island, as it stays in that island's parameters.
    """
    found = exchange
    if any(len(island) > 1 for island in levels.groups["island"]):
        wide = exchange if isinstance(exchange, Hierarchical) else Hierarchical(exchange)
        found = GroupError(wide) if keeps else wide
    return found if levels.has_several("island") else SingleIslandExchange(found)


def stays_of(outcome: Outcome, islands: int) -> Tensor | None:
    """Return the part of a pseudo-gradient that stays with its island: the compression error of its own, if any.

    An island without weight adds the error it made on the others' input, times the number of islands: that reaches the
    mean where islands then have equal weights.
    """
    if outcome.lost is None or outcome.owed is None:
        return outcome.lost
    return outcome.lost.add(outcome.owed, alpha=islands)


@dataclass(frozen=True, slots=True)
class _AroundExchange(Exchange):
    """An exchange between islands around another one, whose state is its own."""

    inner: Exchange

    @property
    def traits(self) -> ExchangeTraits:
        return self.inner.traits

    def init(self, layout: Layout) -> ExchangeState:
        return self.inner.init(layout)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.inner.check(layout, levels)


@dataclass(frozen=True, slots=True)
class SingleIslandExchange(_AroundExchange):
    """An exchange among islands where there is one: its own input is the mean, and nothing is sent or lost.

    The state is that of `inner`, as it is: a run that goes on with more islands finds it.
    """

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        yield from ()
        return Outcome(x.flat, None, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class GroupError(_AroundExchange):
    """An exchange between islands whose compression error is averaged over the island, not left to the rank that sent.

    lost <- sum_{i in I} (w_i lost_i + owed_i) / W_I, W_I = sum of w_i over I: a SUM of float32 more inside the island.
    An island without weight: the mean of its lost_i, and the sum of its owed_i times the number of islands.
    """

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        out = yield from self.inner.run(x, state, at)
        lost = torch.zeros_like(out.mean, dtype=torch.float32) if out.lost is None else out.lost
        mine = at.weights[list(at.levels.group("island", at.rank))]
        weight = float(mine.sum())
        lost.mul_(at.share / weight if weight > 0 else 1 / len(mine))
        if out.owed is not None:
            lost.add_(out.owed, alpha=1 / weight if weight > 0 else len(at.levels.groups["island"]))
        (total,) = yield Message((lost,), Collective.SUM, "island")
        return replace(out, lost=total, owed=None)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return (*self.inner.traffic(layout, levels, rank), Traffic(Collective.SUM, layout.numel, 4, "island"))
