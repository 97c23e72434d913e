"""What `plan.exchange: auto` does when all ranks are there: measure, let the policy in `plan` choose, keep the choice,
and look at it again when the links have drifted.

Everything the choice rests on is exchanged between the ranks first (the slowest counts), and the policy is a pure
function of it: so all ranks come to the same plan without anybody deciding for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossamer import compress, sync
from gossamer.measuring import Measured
from gossamer.memory import Walk
from gossamer.pipeline.links import levels_of_stages
from gossamer.plan import price_apart, price_of
from gossamer.plan.exchange import (
    CANDIDATES,
    Decision,
    across_islands,
    choose,
)
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.rehearse import rehearse
from gossamer.run.stage import Engine
from gossamer.run.trainer import Replan
from gossamer.spec.choice import Exchanges
from gossamer.spec.cost import Cost
from gossamer.spec.links import Links
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_rate
from gossamer.sync import Loop
from gossamer.wire.channel import gathered
from gossamer.wire.message import Levels
from gossamer.wire.probe import PAIRS_RANKS, probe
from gossamer.wire.pump import Pump

_LEAST_BUCKET_BYTES = 1 << 20
_LATENCIES_PER_BUCKET = 40  # of wire time: small enough to overlap, large enough that latency is little of it
_WATCH_STEPS = 20  # how often the rate of the wire is looked at
_DRIFT = 2.0  # by what factor it must have changed


def levels_of(plan: Plan, ranks: int) -> Levels:
    """The levels of a plan's links."""
    if plan.mesh.pipe > 1:
        return levels_of_stages(plan)
    if not plan.islands:
        return Levels.flat(ranks)
    levels = Levels.islands(plan.islands)
    return levels if _loop_of(plan) is None else levels.twice()


def _loop_of(plan: Plan) -> Loop | None:
    """The outer loop of islands that train apart; None where all gradients meet at every step."""
    return sync.build(plan.sync, key="plan.sync").loop


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
    walk: Walk | None = None  # where parameters are sharded
    _measured: Measured | None = None
    _watch: _Watch = field(default_factory=lambda: _Watch())

    def settle(self, *, automatic: bool, hosts: int) -> Plan:
        """Before step 1: the plan with an exchange in place of `auto`, its reason and forecast, and with the islands
        that its exchange asks for.
        """
        if (loop := _loop_of(self.plan)) is not None:
            self._part(loop, hosts)
        elif self.plan.exchange == "auto" and hosts == 1:
            why = "all-reduce: every process is on this machine"
            self.plan = self.plan.model_copy(
                update={"exchange": "dense", "reasons": {**self.plan.reasons, "exchange": why}}
            )
        elif self.plan.exchange == "auto":
            self._choose(probe(self.pump.channel))
            self.tell(f"exchange: {self.plan.reasons['exchange']}", 0)
        elif asks_for_islands(self.plan.exchange) and not self.plan.islands:
            self._learn(probe(self.pump.channel))
        if self.walk is not None:
            cost = self._price(self.plan.exchange)
            said = {"wire_bytes": cost.wire_bytes, "sent_bytes": cost.sent_bytes}
            self.plan = self.plan.model_copy(update={"forecast": self.plan.forecast.model_copy(update=said)})
        self._watch.active = automatic and hosts > 1 and loop is None
        self._watch.rate(self.pump)  # what has passed so far was no training
        return self.plan

    def _part(self, loop: Loop, hosts: int) -> None:
        """Who trains together: what is given, else what the links say, else everybody alone."""
        if not self.plan.islands:
            islands = self._islands(hosts)
            self.plan = self.plan.model_copy(update={"islands": islands})
            self.pump.channel.widen(Levels.islands(islands).twice())
        shapes = tuple((name, tuple(p.shape)) for name, p in trainable(self.engine.module).items())
        forecast = price_apart(loop, self.plan, shapes, self.pump.channel.levels)
        said = f"{len(self.plan.islands)} islands {[list(i) for i in self.plan.islands]} meet every {loop.every} steps"
        reasons = {**self.plan.reasons, "sync": said}
        self.plan = self.plan.model_copy(update={"forecast": forecast, "reasons": reasons})
        self.tell(f"sync: {said}", 0)

    def _islands(self, hosts: int) -> tuple[tuple[int, ...], ...]:
        everyone = self.pump.channel.levels.everyone
        if hosts > 1 and len(everyone) > PAIRS_RANKS and len(everyone) % hosts == 0:  # too many pairs to measure
            each = len(everyone) // hosts
            return tuple(everyone[at : at + each] for at in range(0, len(everyone), each))
        links = probe(self.pump.channel) if hosts > 1 else None
        if links is not None and links.has_islands:
            return links.islands
        return tuple((rank,) for rank in everyone)

    def replan(self, step: int) -> Replan | None:
        """At a step's border: None, or what the drifted links make better."""
        if not self._watch.due(step):
            return None
        rate = float(gathered(self.pump.channel, [self._watch.rate(self.pump)]).min())
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
        levels, plan = self.pump.channel.levels, self.plan
        return price_of(
            written,
            shapes,
            levels,
            bucket_bytes=plan.bucket_bytes,
            states=plan.states,
            walk=self.walk,
            microbatches=plan.microbatches[0],
        )

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
            self._measured = Measured.by(rehearsal, params, candidates, self.pump, bucket_bytes)
        decision = choose(self._measured.facts(links, self.pump), lossy=self.lossy, candidates=candidates)
        self.waited = decision.waited
        exact = decision.written == candidates[0].written
        self.plan = self.plan if exact else self.plan.model_copy(update={"bucket_bytes": bucket_bytes})
        self.plan = _planned(self.plan, decision, links, self._price(decision.written))


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


def _bucket_bytes(links: Links, largest: int) -> int:
    """Slow links have time for small buckets, which overlap better and can be treated one by one."""
    link = links.levels.get("between", links.levels["all"])
    wanted = int(_LATENCIES_PER_BUCKET * link.latency_s * link.bytes_per_s)
    return min(largest, max(_LEAST_BUCKET_BYTES, wanted))


def _planned(plan: Plan, decision: Decision, links: Links, cost: Cost) -> Plan:
    link = links.levels.get("between", links.levels["all"])
    said = f"{decision.reason} (links: {show_rate(link.bytes_per_s)}, {1e3 * link.latency_s:.1f} ms)"
    line = decision.forecast
    times: dict[str, object] = {"state_bytes": plan.forecast.state_bytes, "step_s": line.step_s}
    times |= {"compute_s": line.step_s - line.exposed_s, "wire_s": line.wire_s, "exposed_s": line.exposed_s}
    return plan.model_copy(
        update={
            "exchange": decision.written,
            "reasons": {**plan.reasons, "exchange": said},
            "forecast": cost.model_copy(update=times),
        }
    )
