"""What a choice of exchanges rests on besides the links: when buckets fill, what candidates cost and what they lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer import compress
from gossamer.compress import Exchange
from gossamer.compress.dense import Dense
from gossamer.plan.exchange import BucketFacts, Candidate, Facts, Option, RoundFacts, timeline, wire_seconds
from gossamer.run.rehearse import Rehearsal, stolen_share
from gossamer.spec.errors import BadInput
from gossamer.spec.links import Links
from gossamer.spec.plan import BUCKET_BYTES
from gossamer.sync import Loop, buckets_of, exchange_of_second_moments, exchanges_of_round
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

    def round_facts(
        self, loop: Loop, links: Links, levels: Levels, params: Mapping[str, Tensor], units: Sequence[str], pump: Pump
    ) -> RoundFacts:
        """A step of an island by itself, and a round of `loop` between the islands of `levels`. All ranks measure what
        encoding takes at once; the slowest counts.
        """
        inside = levels.only("island")
        near = links.model_copy(update={"levels": {"all": links.levels.get("island", links.levels["all"])}})
        buckets = tuple(
            BucketFacts((), w.numel, at, 0.0, ()) for w, at in zip(self.layouts, self.times[3:], strict=True)
        )
        dense = [Option(0.0, *_on_wire(Dense(), where, inside, near), 0.0) for where in self.layouts]
        fragments = exchanges_of_round(loop, params, levels, units=units, bucket_bytes=BUCKET_BYTES)
        squares = exchange_of_second_moments(levels)
        cpu_s = sum(compress.seconds_of(x, where, levels, pump.channel.rank) for one in fragments for where, x in one)
        return RoundFacts(
            step_s=timeline(Facts(buckets, *self.times[:3]), dense).step_s,
            fragments_s=tuple(sum(_on_wire(x, where, levels, links)[0] for where, x in one) for one in fragments),
            cpu_s=float(gathered(pump.channel, [cpu_s]).max()),
            stolen=self.times[2],
            second_moments_s=sum(_on_wire(squares, where, levels, links)[0] for one in fragments for where, _ in one),
        )


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
    return None if exchange is None else Option(cpu_s, *_on_wire(exchange, where, levels, links), loss)


def _on_wire(exchange: Exchange, where: Layout, levels: Levels, links: Links) -> tuple[float, int]:
    """(seconds, bytes of the rank that sends most)."""
    everyone = sorted(r for group in levels.groups["all"] for r in group)
    half = _SAMPLED_RANKS // 2
    asked = everyone if len(everyone) <= _SAMPLED_RANKS else [*everyone[:half], *everyone[-half:]]
    return wire_seconds({r: exchange.traffic(where, levels, r) for r in asked}, levels, links)


def _loss(exchange: Exchange, where: Layout, rehearsal: Rehearsal) -> float:
    """|x - kept|^2 / |x|^2 over the gradients of a bucket."""
    square = _square(where, rehearsal)
    if exchange.traits.lossless or not square:
        return 0.0
    names = [e.name for e in where.entries]
    return sum(compress.error_of(exchange, rehearsal.gradients[n], name=n) ** 2 for n in names) / square


def _square(where: Layout, rehearsal: Rehearsal) -> float:
    return sum(float(rehearsal.gradients[e.name].square().sum()) for e in where.entries)
