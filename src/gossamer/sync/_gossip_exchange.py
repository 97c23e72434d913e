"""Exchange of pseudo-gradients for gossip: every rank keeps its neighbors' mean as its compression error.

Equations (rank i, pseudo-gradient D_i = a - x_i from the anchor a, mixing matrix W of the round):
    h_i  <- C(D_i), or h_i + C(D_i - h_i) where neighbors stay and C loses something
    D_i' =  D_i + gamma (sum_j W_ij h_j - h_i)
    mean = 0,   lost_i = D_i'
so that a loop that keeps what is lost continues at x_i = a - D_i' from an unchanged anchor. The outcome fulfills
mean = sum_i w_i (D_i - D_i'), as W does not change the mean of all D, whatever C loses. Without loss and with gamma = 1
this is D_i' = sum_j W_ij D_j, summed in rank order.
Symbols: h the value of D known at both ends of a link, the same bits; C, decoded; w_i weights, sum_i w_i = 1.
Wire:    1 uneven SHUFFLE, the code of D to every neighbor.   State: numel float32 for itself and for each neighbor,
where those stay and C loses something; else none.
Paper:   Koloskova et al., CHOCO-SGD, ICML 2019, arXiv 1902.00340 (gamma, and the difference to what is known).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange.codec import Codec
from gossamer.sync.topology import Topology


@dataclass(frozen=True, slots=True)
class GossipExchange(Exchange):
    """An exchange that mixes each rank's pseudo-gradient with its neighbors' and returns a mean of zero.

    Use it in an outer loop with `keeps` only: as an exchange of gradients it would stop all training.
    """

    graph: Topology
    codec: Codec
    gamma: float = 1.0

    @property
    def traits(self) -> ExchangeTraits:
        # Of changing neighbors the price is the mean over rounds.
        return ExchangeTraits(fixed_size=bool(self.graph.fixed_degree))

    @property
    def _known(self) -> tuple[str, ...]:
        """Return the names of the remembered states: the rank's own, then its neighbors' in order."""
        count = 0 if self.codec.traits.lossless or not self.graph.fixed_degree else 1 + self.graph.fixed_degree
        return tuple(f"h{i}" for i in range(count))

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState({name: torch.zeros(layout.numel, device=layout.device) for name in self._known})

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        numel, key = x.layout.numel, key_of(at, x.layout)
        near = self.graph.near(at.place, len(at.members), at.key)
        known = [state.tensors[name] for name in self._known]
        sent = self.codec.encode(x.flat - known[0] if known else x.flat, key) if numel else x.flat.new_empty(0).byte()
        splits = tuple(len(sent) if i in near else 0 for i in range(len(at.members)))
        (arrived,) = yield Message((sent.repeat(len(near)),), Collective.SHUFFLE, splits=splits, arriving=splits)
        lost = x.flat.clone()
        if numel and near:
            held = {}
            messages = zip((at.place, *near), (sent, *arrived.view(len(near), -1)), strict=True)
            for index, (place, message) in enumerate(messages):
                told = self.codec.decode(message, numel, key)
                held[place] = told.add_(known[index]) if known else told
            mine = held[at.place]
            mixed = torch.zeros_like(mine)
            for place, part in self.graph.row(at.place, at.shares, at.key).items():
                mixed.add_(held[place], alpha=part)
            lost.sub_(mine, alpha=self.gamma).add_(mixed, alpha=self.gamma)
            fresh = dict(zip(self._known, held.values(), strict=False))
            state = ExchangeState({**state.tensors, **fresh})
        return Outcome(torch.zeros_like(x.flat), lost, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        group = levels.group("all", rank)
        size = self.codec.nbytes(layout.numel) if layout.numel else 0
        splits = _whole([size * n for n in self.graph.copies(group.index(rank), len(group))])
        return (Traffic(Collective.SHUFFLE, sum(splits), 1, splits=splits, arriving=splits),)


def _whole(parts: list[float]) -> tuple[int, ...]:
    """Return integers near `parts` with their sum."""
    found: list[int] = []
    carried = 0.0
    for part in parts:
        carried += part
        found.append(round(carried) - sum(found))
    return tuple(found)
