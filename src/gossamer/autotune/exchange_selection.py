"""What `plan.exchange: auto` does when all ranks are there: measure, let the policy in `plan` choose, keep the choice,
and look at it again when the links have drifted.

Everything the choice rests on is exchanged between the ranks first (the slowest counts), and the policy is a pure
function of it: so all ranks come to the same plan without anybody deciding for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gossamer import exchange as exchange_methods
from gossamer import sharding as sharding_methods
from gossamer import sync
from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.link_probe import PAIRS_RANKS, probe
from gossamer.comm.message import ProcessGroups
from gossamer.pipeline.stage_links import levels_of_stages
from gossamer.plan import law, price_apart, price_of
from gossamer.plan.adapt import Policy
from gossamer.plan.exchange import CANDIDATES, PERIODS, Decision, across_islands, choose, choose_period, written_of
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.profile_step import StepProfile, profile_step
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.trainer import Replan
from gossamer.sharding import UnshardOrder
from gossamer.spec.cost import Cost
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges, MethodConfig, Written
from gossamer.spec.network import Network
from gossamer.spec.plan import BUCKET_BYTES, Plan
from gossamer.spec.statistics import Paths, Statistics
from gossamer.spec.units import show_rate
from gossamer.sync import OuterLoopConfig

_LEAST_BUCKET_BYTES = 1 << 20
_LATENCIES_PER_BUCKET = 40  # of wire time: small enough to overlap, large enough that latency is little of it
_WATCH_STEPS = 20  # how often the rate of the wire is looked at
_DRIFT = 2.0  # by what factor it must have changed
_REHEARSALS = 3  # batches that are tried for one whose gradients are finite


def levels_of(plan: Plan, ranks: int) -> ProcessGroups:
    """The levels of a plan's links."""
    if plan.mesh.pipe > 1:
        return levels_of_stages(plan)
    if not plan.islands:
        return ProcessGroups.flat(ranks)
    levels = ProcessGroups.islands(plan.islands)
    return levels if outer_loop_of(plan) is None else levels.twice()


def outer_loop_of(plan: Plan) -> OuterLoopConfig | None:
    """The outer loop of islands that train apart; None where gradients meet at every step, or that is open."""
    return None if plan.sync == "auto" else sync.build(plan.sync, key="plan.sync").loop


def is_synchronous(plan: Plan) -> bool:
    """Whether it is gradients that meet, of all ranks and at every step; or that is open."""
    return plan.sync == "auto" or sync.build(plan.sync, key="plan.sync").is_plain


def uplinks_downlinks_of(links: Network) -> Paths:
    """Every rank's way out and in; the level's own link where nothing else was found."""
    usual = links.levels["all"]
    ranks = sorted(r for island in links.islands for r in island)
    up, down = (tuple(ways.get(r, usual) for r in ranks) for ways in (links.uplinks, links.downlinks))
    return Paths(up=up, down=down)


@dataclass(slots=True, kw_only=True)
class ExchangeSelector:
    """One rank's part in choosing; all ranks call the same methods between the same steps."""

    engine: ModelRuntime
    feed: Feed
    pump: CommThread
    lossy: bool
    steps: int  # of the run
    plan: Plan
    tell: Callable[[str, int], None]  # an event: message, step
    keep: Callable[[Plan], None]  # a plan that has changed
    policy: Policy | None = None  # for what goes between islands that train apart, by every rank's own way out and in
    waited: Mapping[str, float] = field(default_factory=dict)  # by parameter; empty where nothing was measured
    walk: UnshardOrder | None = None  # where parameters are sharded
    tells: bool = False  # whether the update rule has second moments that islands can bring together
    _measured: ExchangeProfile | None = None
    _sick: tuple[int, ...] = ()  # ranks whose gradients were not finite in any rehearsal; then the choice is of bytes
    _most_bucket_bytes: int = 0  # where links have no say
    _watch: _BandwidthMonitor = field(default_factory=lambda: _BandwidthMonitor())

    def __post_init__(self) -> None:
        self._most_bucket_bytes = self.plan.bucket_bytes
        if self.plan.exchange != "auto" and not self._states_are_sharded():  # what was cut for the links of another day
            self._most_bucket_bytes = max(BUCKET_BYTES, self.plan.bucket_bytes)

    def settle(self, *, automatic: bool, hosts: int) -> Plan:
        """Before step 1: the plan with an exchange in place of `auto`, its reason and forecast, and with the islands
        that its exchange asks for.
        """
        loop = outer_loop_of(self.plan)
        if loop is not None:
            self._part(loop, hosts)
        elif self.plan.exchange == "auto" and hosts == 1:
            why = "every process is on this machine"
            self._adopt("exchange", "dense", f"all-reduce: {why}")
            if self.plan.sync == "auto":
                self._adopt("sync", "every_step", f"every step: {why}")
        elif self.plan.exchange == "auto":
            links = probe(self.pump.channel)
            decision = self._choose(links)
            self.tell(f"exchange: {self.plan.reasons['exchange']}", 0)
            if self.plan.sync == "auto":
                self._choose_period(decision, links)
        elif not self.plan.islands and (exchange_methods.asks_for_islands(self.plan.exchange) or self._shards(hosts)):
            self._learn(probe(self.pump.channel))
            if self.plan.islands:
                self._reprice()
        if self.walk is not None:
            self._reprice()
        self._watch.active = automatic and hosts > 1 and is_synchronous(self.plan)
        self._watch.rate(self.pump)  # what has passed so far was no training
        return self.plan

    def _adopt(self, field: str, written: Written, reason: str) -> None:
        self.plan = self.plan.model_copy(update={field: written, "reasons": {**self.plan.reasons, field: reason}})

    def _choose_period(self, decision: Decision, links: Network) -> None:
        """Whether gradients meet at every step, or islands part."""
        assert self._measured is not None
        links = _of(links, self.plan.islands) if self.plan.islands else links
        islands = self.plan.islands or tuple((rank,) for rank in self.pump.channel.levels.everyone)
        periods = [period for period in PERIODS if bool(period.second_moments) == self.tells]
        loop = sync.build(written_of(periods[0], 1, self.steps)).loop  # all of them send the same in a round
        assert loop is not None
        cut = bucket_bytes_for(links, self._most_bucket_bytes)
        facts = self._measured.round_facts(loop, links, ProcessGroups.islands(islands), self.plan.units, cut)
        chosen = choose_period(decision, facts, steps=self.steps, lossy=self.lossy, periods=periods)
        self._adopt("sync", chosen.sync or "every_step", chosen.reason)
        self.tell(f"sync: {chosen.reason}", 0)
        if (loop := outer_loop_of(self.plan)) is not None and chosen.forecast is not None:
            self._part_into(islands)
            self._price_apart(loop, step_s=chosen.forecast.step_s, exposed_s=chosen.forecast.exposed_s)

    def _shards(self, hosts: int) -> bool:
        """Whether sharded states go by islands, if there are any; sharded parameters do where that was asked for."""
        sharding = sharding_methods.build(self.plan.states, key="plan.states")
        return hosts > 1 and sharding.is_sharded and (sharding.needs_islands or not sharding.takes_parameters)

    def _states_are_sharded(self) -> bool:
        return sharding_methods.build(self.plan.states, key="plan.states").is_sharded

    def _part(self, loop: OuterLoopConfig, hosts: int) -> None:
        """Who trains together: what is given, else what the links say, else everybody alone."""
        self._part_into(self.plan.islands or self._islands(hosts))
        when = f"every {loop.every} steps" + (f", from step {loop.steady} on" if loop.doubles else "")
        said = f"{len(self.plan.islands)} islands {[list(i) for i in self.plan.islands]} meet {when}"
        round_s = 0.0
        if loop.steps:
            loop, round_s, each = self._paced(loop)
            said += f": {each}, {round_s:.3g} s of computing a round"
        if self._states_are_sharded():
            said += f"; in each, states are shared out among {min(map(len, self.plan.islands))} of its ranks"
        if self.policy is not None:
            loop = self._by_ways(loop, self.policy)
        self._price_apart(loop, compute_s=round_s / loop.every, state_bytes=self.plan.forecast.state_bytes)
        self._adopt("sync", self.plan.sync, said)
        self.tell(f"sync: {said}", 0)
        if unused := law.not_used_inside(loop, self.plan.islands, self.plan.exchange):
            reasons = {**self.plan.reasons, "exchange": unused}
            self.plan = self.plan.model_copy(update={"reasons": reasons})
            self.tell(f"exchange: {unused}", 0)

    def _part_into(self, islands: tuple[tuple[int, ...], ...]) -> None:
        levels = ProcessGroups.islands(islands).twice()
        if self.pump.channel.levels != levels:
            self.pump.channel.widen(levels)
        self.plan = self.plan.model_copy(update={"islands": islands})

    def _price_apart(self, loop: OuterLoopConfig, **known: object) -> None:
        shapes = tuple((name, tuple(p.shape)) for name, p in trainable(self.engine.module).items())
        forecast = price_apart(loop, self.plan, shapes, self.pump.channel.levels)
        self.plan = self.plan.model_copy(update={"forecast": forecast.model_copy(update=known)})

    def _paced(self, loop: OuterLoopConfig) -> tuple[OuterLoopConfig, float, str]:
        """How many steps of a round each island makes, as given or as there is time for; what a round takes; in words.
        An island is as fast as its slowest rank.
        """
        mine = profile_step(self.engine, self.feed, trainable(self.engine.module)).compute_s
        by_rank = gathered(self.pump.channel, [mine])[:, 0].tolist()
        islands = self.plan.islands
        seconds = [max(by_rank[rank] for rank in island) for island in islands]
        if loop.steps == "auto":
            loop = self._with(steps=list(sync.by_speed(seconds, loop.every)))
        pairs = list(zip(loop.steps_of(islands), seconds, strict=True))
        said = ", ".join(
            f"{list(island)} makes {n} of {s:.3g} s" for island, (n, s) in zip(islands, pairs, strict=True)
        )
        return loop, max(n * s for n, s in pairs), said

    def _by_ways(self, loop: OuterLoopConfig, policy: Policy) -> OuterLoopConfig:
        """What goes between islands as the policy says, of the ways out and in as they are now."""
        islands = self.plan.islands
        if any(len(island) > 1 for island in islands):
            raise bad_input(
                wanted="islands of one rank each, whose ways out are known",
                got=str([list(island) for island in islands]),
                do="leave plan.adapt at none, and name plan.sync's exchange",
                key="plan.adapt",
            )
        numel = {name: p.numel() for name, p in trainable(self.engine.module).items()}
        statistics = Statistics(names=tuple(numel), numel=tuple(numel.values()))
        choices = policy.choose(statistics, uplinks_downlinks_of(self.links()))
        self.plan = self.plan.model_copy(update={"reasons": {**self.plan.reasons, "adapt": choices.reason}})
        self.tell(f"adapted: {choices.reason}", 0)
        return self._with(exchange=choices.rules[0][2])

    def _with(self, **parameters: Any) -> OuterLoopConfig:
        """The outer loop with other settings, which the plan keeps."""
        choice = MethodConfig.parse(self.plan.sync)
        written = MethodConfig(choice.name, {**choice.parameters, **parameters}).written()
        self.plan = self.plan.model_copy(update={"sync": written})
        loop = outer_loop_of(self.plan)
        assert loop is not None
        return loop

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
        self._choose(probe(self.pump.channel), step)
        self._watch.begin_anew(self.pump)
        chosen, cut = self.plan.exchange, self.plan.bucket_bytes
        in_force = {name: getattr(before, name) for name in ("exchange", "adapted_from", "bucket_bytes")}
        self.plan = self.plan.model_copy(update=in_force)
        said = f"the links have drifted; exchange: {self.plan.reasons['exchange']}"
        if chosen not in (before.exchange, before.adapted_from):
            changed = self.change(chosen, step, said, adapted_from="", bucket_bytes=cut)
            if changed is not None:
                return changed
        self._reprice()  # what is in force goes on, and what was made of it since it was chosen
        self.keep(self.plan)
        self.tell(said, step)
        return None

    def change(
        self, written: Exchanges, step: int, said: str, *, adapted_from: Exchanges, bucket_bytes: int = 0
    ) -> Replan | None:
        """At a step's border: go on with another exchange, in which feedback goes on wherever something may be owed; in
        buckets of the size in force, where no other is given. None where it is the one in force.
        """
        params = trainable(self.engine.module)
        before, after = (exchange_methods.rules(w).by_name(params) for w in (self.plan.exchange, written))
        lacking = [
            n
            for n in params
            if exchange_methods.has_residual(before[n]) and not exchange_methods.has_residual(after[n])
        ]
        written = exchange_methods.with_error_feedback(written, lacking)
        if written == self.plan.exchange:
            return None
        update = {"exchange": written, "adapted_from": adapted_from}
        self.plan = self.plan.model_copy(update={**update, "bucket_bytes": bucket_bytes or self.plan.bucket_bytes})
        self._reprice()
        self._watch.first = 0.0  # other messages pass at another rate: the next window is the measure
        self.keep(self.plan)
        self.tell(said, step)
        return Replan(exchange_methods.rules(written).by_name(params), self.plan.bucket_bytes)

    def _reprice(self) -> None:
        """Forecast the bytes of a step anew, on the links as they are known now."""
        cost = self._price(self.plan.exchange)
        said = {"wire_bytes": cost.wire_bytes, "sent_bytes": cost.sent_bytes}
        self.plan = self.plan.model_copy(update={"forecast": self.plan.forecast.model_copy(update=said)})

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

    def links(self) -> Network:
        """The links as they are now: some seconds, between two steps."""
        links = probe(self.pump.channel, ways=True)
        self._watch.rate(self.pump)  # what has passed was no training
        return links

    def _learn(self, links: Network) -> None:
        if links.has_islands and not self.plan.islands:
            self.plan = self.plan.model_copy(update={"islands": links.islands})
            self.pump.channel.widen(ProcessGroups.islands(links.islands))

    def _choose(self, links: Network, step: int = 0) -> Decision:
        """With gradients of `step`, where those of an earlier one are not known; the plan becomes what is chosen."""
        self._learn(links)
        links = _of(links, self.plan.islands)
        bucket_bytes = bucket_bytes_for(links, self._most_bucket_bytes)
        candidates = across_islands(CANDIDATES) if self.plan.islands else CANDIDATES
        measured = self._measure(step)
        facts = measured.facts(links, candidates, bucket_bytes)
        decision = choose(facts, lossy=self.lossy and measured.knows, candidates=candidates)
        self.waited = decision.waited
        exact = decision.written == candidates[0].written
        cut = {"bucket_bytes": self._most_bucket_bytes if exact else bucket_bytes}
        self.plan = self.plan.model_copy(update=cut)
        self.plan = _planned(self.plan, decision, links, self._price(decision.written), self._unknown)
        return decision

    @property
    def _unknown(self) -> str:
        """What a choice could not rest on, in words."""
        if not self._sick:
            return ""
        return (
            f"; gradients of {_REHEARSALS} batches were not finite on ranks {list(self._sick)}: what a lossy exchange "
            "loses is not known, so only what is exact, or bf16, was held against the wire"
        )

    def _measure(self, step: int) -> ExchangeProfile:
        """What does not change with the links; once, but that losses are looked for again where they are not known."""
        if self._measured is None or not self._measured.knows:
            params = trainable(self.engine.module)
            rehearsal, self._sick = self._rehearsed(step)
            self._measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, self.pump, knows=not self._sick)
        return self._measured

    def _rehearsed(self, step: int) -> tuple[StepProfile, tuple[int, ...]]:
        """Of the first batch from `step` on whose gradients are finite on all ranks; of some, the last one, and who had
        none then. One bad batch is no bad run: its step will be rejected and tried again.
        """
        params, channel = trainable(self.engine.module), self.pump.channel
        for batch in range(step, step + _REHEARSALS):
            rehearsal = profile_step(self.engine, self.feed, params, batch)
            is_finite = all(bool(torch.isfinite(g).all()) for g in rehearsal.gradients.values())
            sound = gathered(channel, [float(is_finite)])[:, 0].tolist()
            sick = tuple(rank for rank, ok in zip(channel.levels.everyone, sound, strict=True) if not ok)
            if not sick:
                break
        return rehearsal, sick


@dataclass(slots=True)
class _BandwidthMonitor:
    """The rate at which messages pass, against the rate right after the choice."""

    active: bool = False
    every: int = _WATCH_STEPS
    first: float = 0.0
    sent_bytes: int = 0
    busy_s: float = 0.0

    def due(self, step: int) -> bool:
        return self.active and step % self.every == 0

    def rate(self, pump: CommThread) -> float:
        """Bytes per second of waiting for messages under way, since the last call."""
        sent, busy = pump.channel.meter.total_bytes - self.sent_bytes, pump.busy_s - self.busy_s
        self.sent_bytes, self.busy_s = pump.channel.meter.total_bytes, pump.busy_s
        return sent / max(busy, 1e-6)

    def drifted(self, rate: float) -> bool:
        if not self.first:
            self.first = rate
            return False
        return not 1 / _DRIFT < rate / self.first < _DRIFT

    def begin_anew(self, pump: CommThread) -> None:
        """After a look at the links: the next window is the measure. Looks get rarer, as each costs seconds."""
        self.first, self.every = 0.0, 2 * self.every
        self.rate(pump)


def bucket_bytes_for(links: Network, largest: int) -> int:
    """Slow links have time for small buckets, which overlap better and can be treated one by one."""
    link = links.levels.get("between", links.levels["all"])
    wanted = int(_LATENCIES_PER_BUCKET * link.latency_s * link.bytes_per_s)
    return min(largest, max(_LEAST_BUCKET_BYTES, wanted))


def _of(links: Network, islands: tuple[tuple[int, ...], ...]) -> Network:
    """What `links` say of these islands; where others are seen now, or none, all ranks are as near as the farthest."""
    if not links.has_islands or {frozenset(i) for i in links.islands} == {frozenset(i) for i in islands}:
        return links
    return links.model_copy(update={"levels": {"all": links.levels["all"]}})


def _planned(plan: Plan, decision: Decision, links: Network, cost: Cost, beside: str) -> Plan:
    link = links.levels.get("between", links.levels["all"])
    said = f"{decision.reason}{beside} (links: {show_rate(link.bytes_per_s)}, {1e3 * link.latency_s:.1f} ms)"
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
