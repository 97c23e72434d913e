"""What `plan.exchange: auto` does when all ranks are there: measure, let the policy in `plan` choose, keep the choice.

Everything the choice rests on is exchanged between the ranks first (the slowest counts), and the policy is a pure
function of it: so all ranks come to the same plan without anybody deciding for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer import compress
from gossamer.compress import Exchange
from gossamer.plan import price_of
from gossamer.plan.exchange import (
    CANDIDATES,
    BucketFacts,
    Candidate,
    Decision,
    Facts,
    Option,
    across_islands,
    choose,
    wire_seconds,
)
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.rehearse import Rehearsal, rehearse, stolen_share
from gossamer.run.stage import Engine
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput
from gossamer.spec.links import Links
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_rate
from gossamer.sync import buckets_of
from gossamer.wire.bucket import Layout
from gossamer.wire.message import Combine, Levels, Message
from gossamer.wire.probe import probe
from gossamer.wire.pump import Pump

_SAMPLED_RANKS = 16  # beyond, prices are asked of the first and the last ranks only


def settle_exchange(plan: Plan, engine: Engine, feed: Feed, pump: Pump, *, lossy: bool, hosts: int) -> Plan:
    """The plan with an exchange in place of `auto`, its reason and its forecast. All ranks call it before step 1."""
    if hosts == 1:
        why = "all-reduce: every process is on this machine"
        return plan.model_copy(update={"exchange": "dense", "reasons": {**plan.reasons, "exchange": why}})
    links = probe(pump.channel)
    if links.has_islands:
        pump.channel.widen(Levels.islands(links.islands))
    candidates = across_islands(CANDIDATES) if links.has_islands else CANDIDATES
    params = trainable(engine.module)
    rehearsal = rehearse(engine, feed, params)
    facts = gather_facts(rehearsal, params, candidates, links, pump, bucket_bytes=plan.bucket_bytes)
    decision = choose(facts, lossy=lossy, candidates=candidates)
    link = links.levels.get("between", links.levels["all"])
    said = f"{decision.reason} (links: {show_rate(link.bytes_per_s)}, {1e3 * link.latency_s:.1f} ms)"
    return plan.model_copy(
        update={
            "exchange": decision.written,
            "reasons": {**plan.reasons, "exchange": said},
            "forecast": _forecast(plan, decision, params, pump),
        }
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """Every candidate beside every bucket of a model; None where it cannot or should not serve."""

    layouts: tuple[Layout, ...]
    cells: tuple[tuple[Exchange | None, ...], ...]

    @staticmethod
    def of(params: Mapping[str, Tensor], candidates: Sequence[Candidate], levels: Levels, bucket_bytes: int) -> _Table:
        built = [compress.build(c.written) for c in candidates]
        cut = buckets_of(params, dict.fromkeys(params, built[0]), bucket_bytes=bucket_bytes)
        layouts = tuple(layout for layout, _ in cut)
        pairs = list(zip(candidates, built, strict=True))
        cells = tuple(tuple(x if _serves(c, x, where, levels) else None for c, x in pairs) for where in layouts)
        return _Table(layouts, cells)

    def each(self, ask: Callable[[Exchange, Layout], float]) -> list[float]:
        """One number per cell, row by row; 0 where there is none."""
        return [
            0.0 if exchange is None else ask(exchange, where)
            for where, row in zip(self.layouts, self.cells, strict=True)
            for exchange in row
        ]


def gather_facts(
    rehearsal: Rehearsal,
    params: Mapping[str, Tensor],
    candidates: Sequence[Candidate],
    links: Links,
    pump: Pump,
    *,
    bucket_bytes: int,
) -> Facts:
    """Measure what every candidate costs and loses on every bucket; the slowest rank's numbers. All ranks call it."""
    levels, rank = pump.channel.levels, pump.channel.rank
    table = _Table.of(params, candidates, levels, bucket_bytes)
    cpu = _slowest(pump, table.each(lambda x, where: compress.seconds_of(x, where, levels, rank)))
    loss = _slowest(pump, table.each(lambda x, where: _loss(x, where, rehearsal)))
    ready = [max(rehearsal.ready_s[e.name] for e in where.entries) for where in table.layouts]
    times = _slowest(pump, [rehearsal.compute_s, rehearsal.backward_s, stolen_share(), *ready])
    squares = _slowest(pump, [_square(where, rehearsal) for where in table.layouts])
    cells = iter(zip(cpu, loss, strict=True))
    buckets = []
    for where, row, ready_s, square in zip(table.layouts, table.cells, times[3:], squares, strict=True):
        options = [_option(x, where, levels, links, *numbers) for x, numbers in zip(row, cells, strict=False)]
        names = tuple(e.name for e in where.entries)
        buckets.append(BucketFacts(names, where.numel, ready_s, square / (sum(squares) or 1.0), tuple(options)))
    return Facts(tuple(buckets), compute_s=times[0], backward_s=times[1], stolen=times[2])


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


def _slowest(pump: Pump, mine: Sequence[float]) -> list[float]:
    """Of every number the largest of all ranks."""
    (rows,) = pump.channel.start(Message((torch.tensor(mine, dtype=torch.float64),), Combine.GATHER)).wait()
    return [float(v) for v in rows.max(0).values]


def _forecast(plan: Plan, decision: Decision, params: Mapping[str, Tensor], pump: Pump) -> Cost:
    shapes = tuple((name, tuple(p.shape)) for name, p in params.items())
    cost = price_of(decision.written, shapes, pump.channel.levels, bucket_bytes=plan.bucket_bytes)
    line = decision.forecast
    return cost.model_copy(
        update={
            "compute_s": line.step_s - line.exposed_s,
            "wire_s": line.wire_s,
            "exposed_s": line.exposed_s,
            "step_s": line.step_s,
        }
    )
