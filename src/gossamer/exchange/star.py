"""Star: every rank sends its part to a hub, which sums and sends the sum back. Two hops instead of a ring's 2 (n-1).

Equations (hub h):
    mean = sum_i w_i x_i      summed by the hub alone, in rank order
Symbols: x_i (numel,) input of rank i; w_i its weight; n ranks.
Wire:    2 uneven shuffles in the bucket's own type: numel to the hub from every other rank, numel back to each.
         A worker sends S bytes, the hub (n-1) S.   State: none.   Work: n numel flop at the hub.
Paper:   Li et al., TPI-LLM, arXiv 2410.00531: latency, not bandwidth, bounds small messages.
Good when: `star_pays`: the message is small beside latency times bandwidth.   Not for: large buckets (the hub's link
carries all of them).   Whatever the order in which messages arrive, the sum is the same, bit for bit.
Unlike the paper: all workers are received from at the same time, and nothing but raw numbers is read from the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.comm.bucket import Bucket, Layout, sum_dtype
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
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Star(Exchange):
    """An all-reduce through one rank. `hub`: index of that rank in its group; auto: the middle one."""

    hub: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        if self.hub != "auto" and self.hub < 0:
            wanted = "the index of a rank in its process group (0 or more), or auto"
            raise bad_input(wanted=wanted, got=repr(self.hub), do="set hub to auto", key="hub")

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(lossless=True)

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        numel, ranks, me = x.layout.numel, len(at.members), at.place
        hub = self._hub(ranks)
        (to_hub, at_hub), (from_hub, back) = _splits(numel, ranks, hub, me)
        parts = x.flat[:0] if me == hub else x.flat
        (arrived,) = yield Message((parts,), Collective.SHUFFLE, splits=to_hub, arriving=at_hub)
        if me != hub:
            (mean,) = yield Message((x.flat[:0],), Collective.SHUFFLE, splits=from_hub, arriving=back)
            return Outcome(mean, None, state)
        others = iter(arrived.view(ranks - 1, numel))
        total = x.flat.new_zeros(numel, dtype=sum_dtype(x.layout.dtype))
        for place, share in enumerate(at.shares):
            total.add_(x.flat if place == me else next(others), alpha=share)
        mean = total.to(x.layout.dtype)
        yield Message((mean.repeat(ranks - 1),), Collective.SHUFFLE, splits=from_hub, arriving=back)
        return Outcome(mean, None, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        group = levels.group("all", rank)
        numel, size = layout.numel, layout.dtype.itemsize
        return tuple(
            Traffic(Collective.SHUFFLE, sum(splits), size, splits=splits, arriving=arriving)
            for splits, arriving in _splits(numel, len(group), self._hub(len(group)), group.index(rank))
        )

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        smallest = min((len(g) for g in levels.groups["all"] if len(g) > 1), default=1)
        if self.hub != "auto" and self.hub >= smallest > 1:
            wanted, do = "a hub in the smallest process group", f"set hub to 0 to {smallest - 1}, or to auto"
            got = f"index {self.hub} in a group of {smallest} ranks"
            raise bad_input(wanted=wanted, got=got, do=do, key="hub")

    def _hub(self, ranks: int) -> int:
        return ranks // 2 if self.hub == "auto" else min(self.hub, ranks - 1)  # a rank alone is its own hub


def _splits(numel: int, ranks: int, hub: int, me: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return (splits, arriving) of both rounds: elements sent to each rank, and received from each."""
    nothing = (0,) * ranks
    others = tuple(0 if place == hub else numel for place in range(ranks))
    hub_alone = tuple(numel if place == hub else 0 for place in range(ranks))
    if me == hub:
        return (nothing, others), (others, nothing)
    return (hub_alone, nothing), (nothing, hub_alone)


def star_pays(nbytes: int, ranks: int, *, latency_s: float, bytes_per_s: float) -> bool:
    """Return whether a star beats a ring: with latency a, bandwidth B, 2a + 2(n-1) S/B < 2(n-1) a + 2(n-1)/n S/B."""
    return nbytes * (ranks - 1) ** 2 < latency_s * bytes_per_s * ranks * (ranks - 2)
