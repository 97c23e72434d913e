"""Tied: parameters that several stages hold, whose gradients are one sum.

Every stage first has the mean of its own part over the replicas; then the stages of a pipeline give each other their
parts, and each adds them up in the same order: so all copies see the same gradient bit for bit, and stay equal.
Equations: g = sum over the stages s that hold the parameter of g_s, the last stage first.
Wire: per holder and parameter, its gradient to each of the other holders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.compress.transfer import Form, Link
from gossamer.wire.message import Levels, Traffic
from gossamer.wire.pump import Pump


@dataclass(frozen=True, slots=True)
class Tied:
    """`holders`: parameter -> ranks of this rank's pipeline that hold it, by stage. In the same order everywhere."""

    rank: int
    levels: Levels
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor], pump: Pump) -> None:
        """Put the sums in place. All ranks of the pipeline call it between the same two steps of the pump."""
        ways = list(self._ways())
        if not ways:
            return
        under = pump.transfers(len(ways))
        for job, (name, link) in enumerate(ways):
            passage = link.passage(Form.of(gradients[name]), (0, 0, 0))
            sends = link.source == self.rank
            under.submit(job, passage.send(gradients[name].clone()) if sends else passage.receive())
        came = {
            (name, link.source): under.result(job).mean
            for job, (name, link) in enumerate(ways)
            if link.target == self.rank
        }
        under.finish()
        for name in dict.fromkeys(name for name, _ in ways):
            parts = [gradients[name] if r == self.rank else came[name, r].detach() for r in self.holders[name]]
            total = parts[-1].clone()
            for part in reversed(parts[:-1]):
                total += part
            gradients[name].copy_(total)

    def traffic(self, forms: Mapping[str, Form]) -> tuple[Traffic, ...]:
        """What this rank sends and awaits."""
        return tuple(link.traffic(forms[name], self.rank) for name, link in self._ways())

    def _ways(self) -> Iterator[tuple[str, Link]]:
        for name, ranks in self.holders.items():
            if self.rank in ranks:
                others = [r for r in ranks if r != self.rank]
                for other in others:
                    yield name, Link(source=other, target=self.rank, levels=self.levels, level="pipe", name=name)
                for other in others:
                    yield name, Link(source=self.rank, target=other, levels=self.levels, level="pipe", name=name)
