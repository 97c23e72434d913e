"""What a choice of exchanges rests on besides the links: when buckets fill, what candidates cost and what they lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer import compress
from gossamer.compress import Exchange
from gossamer.plan.exchange import BucketFacts, Candidate, Facts, Option, wire_seconds
from gossamer.run.rehearse import Rehearsal, stolen_share
from gossamer.spec.errors import BadInput
from gossamer.spec.links import Links
from gossamer.sync import buckets_of
from gossamer.wire.bucket import Layout
from gossamer.wire.channel import gathered
from gossamer.wire.message import Levels
from gossamer.wire.pump import Pump

_SAMPLED_RANKS = 16  # beyond, prices are asked of the first and the last ranks only


@dataclass(frozen=True, slots=True)
class Measured:
    """What does not change with the links: when buckets fill, what candidates cost and lose on them."""

    layouts: tuple[Layout, ...]
    cells: tuple[tuple[Exchange | None, ...], ...]  # every candidate beside every bucket; None where it cannot serve
    cpu_s: tuple[float, ...]  # of the cells, row by row
    loss: tuple[float, ...]
    squares: tuple[float, ...]  # |gradient|^2 of every bucket
    times: tuple[float, ...]  # compute, backward, stolen share, and when every bucket is ready

    @staticmethod
    def by(
        rehearsal: Rehearsal,
        params: Mapping[str, Tensor],
        candidates: Sequence[Candidate],
        pump: Pump,
        bucket_bytes: int,
    ) -> Measured:
        """All ranks measure at once, as they will compute at once; the largest number of all ranks counts."""
        built, levels, rank = [compress.build(c.written) for c in candidates], pump.channel.levels, pump.channel.rank
        cut = buckets_of(params, dict.fromkeys(params, built[0]), bucket_bytes=bucket_bytes)
        layouts = tuple(where for where, _ in cut)
        pairs = list(zip(candidates, built, strict=True))
        cells = tuple(tuple(x if _serves(c, x, where, levels) else None for c, x in pairs) for where in layouts)
        flat = [(x, where) for where, row in zip(layouts, cells, strict=True) for x in row]
        cpu = [compress.seconds_of(x, where, levels, rank) if x else 0.0 for x, where in flat]
        loss = [_loss(x, where, rehearsal) if x else 0.0 for x, where in flat]
        squares = [_square(where, rehearsal) for where in layouts]
        ready = [max(rehearsal.ready_s[e.name] for e in where.entries) for where in layouts]
        times = [rehearsal.compute_s, rehearsal.backward_s, stolen_share(), *ready]
        slowest = (
            tuple(gathered(pump.channel, numbers).max(0).values.tolist()) for numbers in (cpu, loss, squares, times)
        )
        return Measured(layouts, cells, *slowest)

    def facts(self, links: Links, pump: Pump) -> Facts:
        """All of it, with what the wire takes on these links."""
        cells, total = iter(zip(self.cpu_s, self.loss, strict=True)), sum(self.squares) or 1.0
        buckets = []
        for where, row, ready_s, square in zip(self.layouts, self.cells, self.times[3:], self.squares, strict=True):
            options = [_option(x, where, pump.channel.levels, links, *next(cells)) for x in row]
            names = tuple(e.name for e in where.entries)
            buckets.append(BucketFacts(names, where.numel, ready_s, square / total, tuple(options)))
        return Facts(tuple(buckets), *self.times[:3])


def _serves(candidate: Candidate, exchange: Exchange, where: Layout, levels: Levels) -> bool:
    if where.numel < candidate.least_numel:
        return False
    try:
        exchange.check(where, levels)
    except BadInput:
        return False
    return True


def _option(
    exchange: Exchange | None, where: Layout, levels: Levels, links: Links, cpu_s: float, loss: float
) -> Option | None:
    if exchange is None:
        return None
    everyone = sorted(r for group in levels.groups["all"] for r in group)
    half = _SAMPLED_RANKS // 2
    asked = everyone if len(everyone) <= _SAMPLED_RANKS else [*everyone[:half], *everyone[-half:]]
    wire_s, sent = wire_seconds({r: exchange.traffic(where, levels, r) for r in asked}, levels, links)
    return Option(cpu_s, wire_s, sent, loss)


def _loss(exchange: Exchange, where: Layout, rehearsal: Rehearsal) -> float:
    """|x - kept|^2 / |x|^2 over the gradients of a bucket."""
    square = _square(where, rehearsal)
    if exchange.traits.lossless or not square:
        return 0.0
    names = [e.name for e in where.entries]
    return sum(compress.error_of(exchange, rehearsal.gradients[n], name=n) ** 2 for n in names) / square


def _square(where: Layout, rehearsal: Rehearsal) -> float:
    return sum(float(rehearsal.gradients[e.name].square().sum()) for e in where.entries)
