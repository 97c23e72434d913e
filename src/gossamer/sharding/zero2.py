"""Zero2: optimizer states are sharded as in zero1, and a rank keeps only its own rows of the gradients (ZeRO stage 2).

Equations: those of zero1.
Wire:    that of zero1, with any exchange, on islands in two hops: once per step, however many micro-batches it has.
State:   that of zero1, and 1/n of the gradients, where zero1 has all of them; with level island n is an island's ranks.
A bucket is allocated from its first gradient until its exchange has ended. Pending buckets are bounded by the order of
messages: where the link is slower than backward, backward waits for the fifth before it. Buckets are small, 1/64 of the
gradients where that is 1 MiB or more, as each is held some times over while it is pending.
Paper:   Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, stage 2.
Good when: the gradients are much of the memory, and there is one micro-batch per step: with several, the buckets
accumulate the gradients of all of them, and stay allocated in full until the last one's backward.
Unlike the paper: it exchanges every micro-batch's gradients, and so sends as many times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.sharding import Sharding
from gossamer.sharding.zero1 import Zero1


@dataclass(frozen=True, slots=True)
class Zero2(Sharding):
    """Sharded optimizer states and gradients (ZeRO stage 2), over `all` ranks or inside each `island`.

    `whole`: as in zero1.
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

    @property
    def gives_back(self) -> bool:
        return True

    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        return Zero1(self.shard_group).path(levels)

    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        return Zero1(self.shard_group, self.whole).exchange(given, path)
