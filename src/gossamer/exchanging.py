"""What `plan.exchange: auto` does when all ranks are there: measure, let the policy in `plan` choose, keep the choice,
and look at it again when the links have drifted.

Everything the choice rests on is exchanged between the ranks first (the slowest counts), and the policy is a pure
function of it: so all ranks come to the same plan without anybody deciding for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
from gossamer.run.trainer import Replan
from gossamer.spec.choice import Exchanges
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
_LEAST_BUCKET_BYTES = 1 << 20
_LATENCIES_PER_BUCKET = 40  # of wire time: small enough to overlap, large enough that latency is little of it
_WATCH_STEPS = 20  # how often the rate of the wire is looked at
_DRIFT = 2.0  # by what factor it must have changed


def levels_of(plan: Plan, ranks: int) -> Levels:
    """The levels of a plan's links."""
    return Levels.islands(plan.islands) if plan.islands else Levels.flat(ranks)


def asks_for_islands(written: Exchanges) -> bool:
    """Whether an exchange speaks of islands, or may come to."""
    levels = {level for _, level, _ in written} if isinstance(written, list) else set()
    return bool(levels - {"all"}) or '"hierarchical"' in json.dumps(written)


@dataclass(slots=True, kw_only=True)
class Exchanger:
    """One rank's part in choosing; all ranks call the same methods between the same steps."""

    engine: Engine
    feed: Feed
    pump: Pump
    lossy: bool
    plan: Plan
    tell: Callable[[str, int], None]  # an event: message, step
    keep: Callable[[Plan], None]  # a plan that has changed
    waited: Mapping[str, float] = field(default_factory=dict)  # by parameter; empty where nothing was measured
    _measured: _Measured | None = None
    _watch: _Watch = field(default_factory=lambda: _Watch())

    def settle(self, *, automatic: bool, hosts: int) -> Plan:
        """Before step 1: the plan with an exchange in place of `auto`, its reason and forecast, and with the islands
        that its exchange asks for.
        """
        if self.plan.exchange == "auto" and hosts == 1:
            why = "all-reduce: every process is on this machine"
            self.plan = self.plan.model_copy(
                update={"exchange": "dense", "reasons": {**self.plan.reasons, "exchange": why}}
            )
        elif self.plan.exchange == "auto":
            self._choose(probe(self.pump.channel))
            self.tell(f"exchange: {self.plan.reasons['exchange']}", 0)
        elif asks_for_islands(self.plan.exchange) and not self.plan.islands:
            self._learn(probe(self.pump.channel))
        self._watch.active = automatic and hosts > 1
        self._watch.rate(self.pump)  # what has passed so far was no training
        return self.plan

    def replan(self, step: int) -> Replan | None:
        """At a step's border: None, or what the drifted links make better."""
        if not self._watch.due(step):
            return None
        rate = min(_everybodys(self.pump, [self._watch.rate(self.pump)])[0])
        if not self._watch.drifted(rate):
            return None
        before = self.plan
        self._choose(probe(self.pump.channel))
        self._watch.begin_anew(self.pump)
        chosen = self.plan.exchange
        in_force = {"exchange": before.exchange, "adapted_from": before.adapted_from}
        self.plan = self.plan.model_copy(update=in_force)
        said = f"the links have drifted; exchange: {self.plan.reasons['exchange']}"
        if chosen in (before.exchange, before.adapted_from):  # what was made of it since then goes on
            self.keep(self.plan)
            self.tell(said, step)
            return None
        return self.change(chosen, step, said, adapted_from="")

    def change(self, written: Exchanges, step: int, said: str, *, adapted_from: Exchanges) -> Replan | None:
        """At a step's border: go on with another exchange, in which feedback goes on wherever something may be owed.
        None where it is the one in force.
        """
        params = trainable(self.engine.module)
        before, after = (compress.rules(w).by_name(params) for w in (self.plan.exchange, written))
        lacking = [n for n in params if compress.owes(before[n]) and not compress.owes(after[n])]
        written = compress.fed_back(written, lacking)
        if written == self.plan.exchange:
            return None
        cost = self._price(written)
        forecast = self.plan.forecast.model_copy(update={"wire_bytes": cost.wire_bytes, "sent_bytes": cost.sent_bytes})
        update = {"exchange": written, "adapted_from": adapted_from, "forecast": forecast}
        self.plan = self.plan.model_copy(update=update)
        self._watch.first = 0.0  # other messages pass at another rate: the next window is the measure
        self.keep(self.plan)
        self.tell(said, step)
        return Replan(compress.rules(written).by_name(params), self.plan.bucket_bytes)

    def _price(self, written: Exchanges) -> Cost:
        shapes = tuple((name, tuple(p.shape)) for name, p in trainable(self.engine.module).items())
        return price_of(written, shapes, self.pump.channel.levels, bucket_bytes=self.plan.bucket_bytes)

    def links(self) -> Links:
        """The links as they are now: some seconds, between two steps."""
        links = probe(self.pump.channel, ways=True)
        self._watch.rate(self.pump)  # what has passed was no training
        return links

    def _learn(self, links: Links) -> None:
        if links.has_islands and not self.plan.islands:
            self.plan = self.plan.model_copy(update={"islands": links.islands})
            self.pump.channel.widen(Levels.islands(links.islands))

    def _choose(self, links: Links) -> None:
        self._learn(links)
        bucket_bytes = _bucket_bytes(links, self.plan.bucket_bytes)
        candidates = across_islands(CANDIDATES) if self.plan.islands else CANDIDATES
        params = trainable(self.engine.module)
        if self._measured is None:
            rehearsal = rehearse(self.engine, self.feed, params)
            self._measured = _Measured.by(rehearsal, params, candidates, self.pump, bucket_bytes)
        decision = choose(self._measured.facts(links, self.pump), lossy=self.lossy, candidates=candidates)
        self.waited = decision.waited
        exact = decision.written == candidates[0].written
        self.plan = _planned(
            self.plan if exact else self.plan.model_copy(update={"bucket_bytes": bucket_bytes}),
            decision,
            links,
            params,
            self.pump.channel.levels,
        )


@dataclass(slots=True)
class _Watch:
    """The rate at which messages pass, against the rate right after the choice."""

    active: bool = False
    every: int = _WATCH_STEPS
    first: float = 0.0
    sent_bytes: int = 0
    busy_s: float = 0.0

    def due(self, step: int) -> bool:
        return self.active and step % self.every == 0

    def rate(self, pump: Pump) -> float:
        """Bytes per second of waiting for messages under way, since the last call."""
        sent, busy = pump.channel.meter.total_bytes - self.sent_bytes, pump.busy_s - self.busy_s
        self.sent_bytes, self.busy_s = pump.channel.meter.total_bytes, pump.busy_s
        return sent / max(busy, 1e-6)

    def drifted(self, rate: float) -> bool:
        if not self.first:
            self.first = rate
            return False
        return not 1 / _DRIFT < rate / self.first < _DRIFT

    def begin_anew(self, pump: Pump) -> None:
        """After a look at the links: the next window is the measure. Looks get rarer, as each costs seconds."""
        self.first, self.every = 0.0, 2 * self.every
        self.rate(pump)


@dataclass(frozen=True, slots=True)
class _Measured:
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
    ) -> _Measured:
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
            tuple(max(column) for column in _everybodys(pump, numbers)) for numbers in (cpu, loss, squares, times)
        )
        return _Measured(layouts, cells, *slowest)

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


def _everybodys(pump: Pump, mine: Sequence[float]) -> list[list[float]]:
    """Of every number those of all ranks."""
    (rows,) = pump.channel.start(Message((torch.tensor(mine, dtype=torch.float64),), Combine.GATHER)).wait()
    columns: list[list[float]] = rows.T.tolist()
    return columns


def _bucket_bytes(links: Links, largest: int) -> int:
    """Slow links have time for small buckets, which overlap better and can be treated one by one."""
    link = links.levels.get("between", links.levels["all"])
    wanted = int(_LATENCIES_PER_BUCKET * link.latency_s * link.bytes_per_s)
    return min(largest, max(_LEAST_BUCKET_BYTES, wanted))


def _planned(plan: Plan, decision: Decision, links: Links, params: Mapping[str, Tensor], levels: Levels) -> Plan:
    link = links.levels.get("between", links.levels["all"])
    said = f"{decision.reason} (links: {show_rate(link.bytes_per_s)}, {1e3 * link.latency_s:.1f} ms)"
    shapes = tuple((name, tuple(p.shape)) for name, p in params.items())
    cost, line = price_of(decision.written, shapes, levels, bucket_bytes=plan.bucket_bytes), decision.forecast
    times = {"compute_s": line.step_s - line.exposed_s, "wire_s": line.wire_s, "exposed_s": line.exposed_s}
    return plan.model_copy(
        update={
            "exchange": decision.written,
            "reasons": {**plan.reasons, "exchange": said},
            "forecast": cost.model_copy(update={**times, "step_s": line.step_s}),
        }
    )
