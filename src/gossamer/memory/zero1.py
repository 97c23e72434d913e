"""Zero1: each of n ranks holds the update rule's state of a part of the rows of every parameter, updates these, and
gets the others from where they were updated (ZeRO stage 1).

Equations (rows r belong to rank r):
    g[r] = sum_i w_i g_i[r]  on rank r ;   w[r] <- update(w[r], g[r], state[r]) ;   w = (w[0], ..., w[n-1]) on all
Wire:    per bucket a SHUFFLE of (n-1)/n of the gradients and a GATHER of (n-1)/n of the parameters: together what an
all-reduce sends. Through a codec where plan.exchange is two_shot, with feedback where it is around it; under any other
exchange the whole mean goes everywhere first.   State: 1/n of the rule's, and a row of every parameter at most.
Paper:   Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, stage 1. Rows, and not a flat range: rules see tensors of
their own number of dimensions.
Good when: the rule's state is much of the memory.   Not for: rules that look at norms of whole parameters (LAMB).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gossamer.compress import Exchange
from gossamer.compress.dense import Dense
from gossamer.compress.error_feedback import ErrorFeedback
from gossamer.compress.two_shot import TwoShot
from gossamer.memory import Sharding
from gossamer.memory._scatter import Scatter


@dataclass(frozen=True, slots=True)
class Zero1(Sharding):
    """Over all ranks that hold the same parameters."""

    @property
    def is_sharded(self) -> bool:
        return True

    def exchange(self, given: Exchange) -> Exchange:
        if isinstance(given, Dense):
            return Scatter()
        if isinstance(given, TwoShot) and given.codec.traits.fixed_size:
            return Scatter(given.codec)
        if isinstance(given, ErrorFeedback):
            return replace(given, inner=self.exchange(given.inner))
        return given
