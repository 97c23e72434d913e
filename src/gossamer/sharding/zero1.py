"""Zero1: each of n ranks holds the update rule's state of a part of the rows of every parameter, updates these, and
gets the others from where they were updated (ZeRO stage 1).

Equations (rows r belong to rank r):
    g[r] = sum_i w_i g_i[r]  on rank r ;   w[r] <- update(w[r], g[r], state[r]) ;   w = (w[0], ..., w[n-1]) on all
Wire:    per bucket a SHUFFLE of (n-1)/n of the gradients and a GATHER of (n-1)/n of the parameters: together what an
all-reduce sends. Through a codec where plan.exchange is two_shot, with feedback where it is around it; under any other
exchange the whole mean goes everywhere first.   State: 1/n of the rule's, and a row of every parameter at most.
On islands (m islands of k ranks, d numbers), both ways together, per rank:
    level      inside                     between                  state
    all        2 (k-1)/k d                2 (m-1)/m d/k            1/(k m)     gradients and rows in two hops each
    island     2 (k-1)/k d                2 (m-1)/m d/k            1/k         what crosses are gradients alone
So `all` costs no more between islands than `island`, but it waits for a slow link once more after the update. What
plan.exchange says of `hierarchical` (inside, between) is done on these ways.
Paper:   Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, stage 1. Rows, and not a flat range: rules see tensors of
their own number of dimensions. Two hops: Wang et al., ZeRO++, arXiv 2306.10209; a level for states alone: Xu et al.,
arXiv 2501.04266 (partitions of three levels on Frontier).
Good when: the rule's state is much of the memory. Rules that look at whole parameters (LAMB, Muon) need `whole`: each
parameter then has one owner, and a bucket's message is as long as if all owners had as much as the one with the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.exchange.error_feedback import ErrorFeedback
from gossamer.exchange.hierarchical import Hierarchical
from gossamer.exchange.two_shot import TwoShot
from gossamer.sharding import Sharding
from gossamer.sharding._hierarchical_reduce_scatter import HierarchicalReduceScatter, is_by_number
from gossamer.sharding._reduce_scatter import ReduceScatter
from gossamer.sharding._row_partition import path_of


@dataclass(frozen=True, slots=True)
class Zero1(Sharding):
    """Sharded optimizer states (ZeRO stage 1), over `all` ranks with the same parameters or inside each `island`.

    `whole`: a parameter is one rank's, with all its rows: for optimizers that look at whole parameters.
    """

    shard_group: Literal["all", "island"] = "all"
    whole: bool = False

    @property
    def is_sharded(self) -> bool:
        return True

    @property
    def by_parameter(self) -> bool:
        return self.whole

    @property
    def needs_islands(self) -> bool:
        return self.shard_group == "island"

    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        return path_of(self.shard_group, levels)

    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        if isinstance(given, ErrorFeedback):
            return replace(given, inner=self.exchange(given.inner, path))
        if list(path) == ["all"]:
            return _scattered(given, whole=self.whole)
        if isinstance(given, Dense):
            given = Hierarchical(given)
        elif isinstance(given, TwoShot) and given.codec.traits.fixed_size:
            given = Hierarchical(given, given.codec)
        if not isinstance(given, Hierarchical) or not is_by_number(given.inter):
            return given
        if given.inter.traits.masked and not self.whole:  # masks are drawn for a parameter with all its rows
            return given
        between = _scattered(given.inter, whole=self.whole) if "between" in path else given.inter
        return HierarchicalReduceScatter(between, given.intra_codec, self.whole)


def _scattered(given: Exchange, *, whole: bool) -> Exchange:
    """Return a reduce-scatter to the owners of rows in one hop, where the exchange has one."""
    if isinstance(given, Dense):
        return ReduceScatter(whole=whole)
    if isinstance(given, TwoShot) and given.codec.traits.fixed_size:
        return ReduceScatter(given.codec, whole)
    if isinstance(given, ErrorFeedback):
        return replace(given, inner=_scattered(given.inner, whole=whole))
    return given
