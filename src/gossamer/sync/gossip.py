"""Gossip: islands average their parameters with a few neighbors, often, and with everybody rarely.

Equations (island i, period H, round t):
    x_i <- x_i - step(g_i)   H times ;   x_i <- sum_j W_ij x_j
    every K-th round, and in the end:    x_i <- sum_j w_j x_j
Symbols: W mixing matrix of the round, made by `topology`; w_j samples that island j has seen, over those of all; g_i
mean gradient of the island, over its own labels. The mean weighted with w moves by the islands' steps alone, and what
islands differ in contracts by lambda_2(W) per round (lambda_2^2 of the square): see the graph.
Wire:    every H steps one pseudo-gradient to every neighbor, through `codec`; every K H steps an all-reduce of one.
State:   the global parameters, as large as the model; with a codec that loses something and neighbors that stay
(ring), as much for itself and for each neighbor.
Paper:   gossip and synchronization of arXiv 2307.01898, of which it gives no algorithm: this one is ours. Lian et al.,
D-PSGD, NeurIPS 2017, arXiv 1705.09056; Koloskova et al., CHOCO-SGD, ICML 2019, arXiv 1902.00340 (codec and gamma).
In between, what all islands agree on is the last full average: validation, samples and checkpoints are of that.
Good when: an all-reduce among all is slow or fragile, one link at a time is not.   Not for: few islands (local_sgd).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.exchange.codec import Codec
from gossamer.exchange.codec.float32 import Float32
from gossamer.spec.errors import bad_input
from gossamer.sync import OuterLoopConfig, Sync
from gossamer.sync._gossip_exchange import GossipExchange
from gossamer.sync._outer_config import SyncWarmup
from gossamer.sync.outer.average import Average
from gossamer.sync.topology import Topology
from gossamer.sync.topology.pairs import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip(Sync):
    """A gossip method: islands average parameters with neighbors every `sync_every` steps, with all every
    `global_sync_every` rounds.

    `gamma`: consensus step size, below 1 where `codec` loses much.
    """

    sync_every: int = 1
    global_sync_every: int = 16
    topology: Topology = field(default_factory=Pairs)
    codec: Codec = field(default_factory=Float32)
    gamma: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            wanted, do = "a consensus step size above 0 and up to 1", "give 1 to move to the mean of the neighbors"
            raise bad_input(wanted=wanted, got=f"{self.gamma:g}", do=do, key="gamma")
        if self.global_sync_every < 1:
            wanted = "1 or more rounds between averages over all islands"
            do = "give 1 or more (with 1, use local_sgd instead)"
            raise bad_input(wanted=wanted, got=str(self.global_sync_every), do=do, key="global_sync_every")
        if not self.codec.traits.fixed_size:
            do = "name another codec: gossamer methods exchange/codec"
            raise bad_input(wanted="a codec whose messages have a fixed size", got=repr(self.codec), do=do, key="codec")
        Sync.__post_init__(self)

    @property
    def loop(self) -> OuterLoopConfig:
        return OuterLoopConfig(
            sync_every=self.sync_every,
            global_sync_every=self.global_sync_every,
            warmup=SyncWarmup(steps=self.warmup_steps),
            error_reset=True,
            exchange=GossipExchange(self.topology, self.codec, self.gamma),
            outer_optimizer=Average(),
        )
