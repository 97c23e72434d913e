"""Tied weights: parameters that several stages hold, whose gradients are summed over these stages.

Every stage first averages its own part over its ranks, on each of them. Then the stages send each other their parts,
and each rank adds them in the same order: so all copies get the same gradient bit for bit, and stay equal. A rank
receives a stage's part from its counterpart there: with as many ranks per stage, the one at the same index.

Equations: g = sum over the stages s that hold the parameter of g_s, the last stage first.
Wire:    per holder, parameter and other stage that holds it, one gradient to the holder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups, Traffic
from gossamer.p2p import StageLink, TensorSpec
from gossamer.sharding import Holding
from gossamer.spec.mesh import Groups


@dataclass(frozen=True, slots=True)
class TiedWeights:
    """The tied parameters of one rank, whose gradients it sums over stages.

    `holders`: parameter -> by stage, the ranks of this pipeline that hold it; in the same order on all of them.
    """

    rank: int
    levels: ProcessGroups
    holders: Mapping[str, Groups] = field(default_factory=dict)

    @staticmethod
    def of(rank: int, levels: ProcessGroups, holdings: Mapping[str, Holding]) -> TiedWeights:
        """Build the tied parameters of what `rank` holds."""
        return TiedWeights(rank, levels, {name: one.added for name, one in holdings.items() if one.added})

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor], pump: CommThread) -> None:
        """Replace the gradients of tied parameters by their sums over stages.

        All ranks of the pipeline call it between the same two steps of the communication thread.
        """
        ways = list(self._ways())
        if not ways:
            return
        under = pump.transfers(len(ways))
        for job, (name, link) in enumerate(ways):
            passage = link.passage(TensorSpec.of(gradients[name]), (0, 0, 0))
            sends = link.source == self.rank
            under.submit(job, passage.send(gradients[name].clone()) if sends else passage.receive())
        came = {
            (name, link.source): under.result(job).mean
            for job, (name, link) in enumerate(ways)
            if link.target == self.rank
        }
        under.finish()
        for name in dict.fromkeys(name for name, _ in ways):
            sources = [self.rank if self.rank in g else self._counterpart(name, g) for g in self.holders[name]]
            parts = [gradients[name] if r == self.rank else came[name, r].detach() for r in sources]
            total = parts[-1].clone()
            for part in reversed(parts[:-1]):
                total += part
            gradients[name].copy_(total)

    def traffic(self, forms: Mapping[str, TensorSpec]) -> tuple[Traffic, ...]:
        """Return the traffic of every gradient that this rank sends or receives."""
        return tuple(link.traffic(forms[name], self.rank) for name, link in self._ways())

    def _ways(self) -> Iterator[tuple[str, StageLink]]:
        for name, groups in self.holders.items():
            mine = next((group for group in groups if self.rank in group), ())
            others = [group for group in groups if mine and group != mine]
            for group in others:
                source = self._counterpart(name, group)
                yield name, StageLink(source=source, target=self.rank, levels=self.levels, level="pipe", name=name)
            for target in (r for group in others for i, r in enumerate(group) if mine[i % len(mine)] == self.rank):
                yield name, StageLink(source=self.rank, target=target, levels=self.levels, level="pipe", name=name)

    def _counterpart(self, name: str, group: tuple[int, ...]) -> int:
        """Return the rank of another stage from which this rank receives."""
        mine = next(g for g in self.holders[name] if self.rank in g)
        return group[mine.index(self.rank) % len(group)]
