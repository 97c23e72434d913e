"""Choose the exchange of `plan.exchange: auto` with all ranks present, and choose again when the links have drifted.

All measurements are first combined over the ranks (the slowest counts), and the solver in `plan` is a pure function of
them. So all ranks make the same plan without a coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from gossamer import exchange as exchange_methods
from gossamer import sync
from gossamer.autotune.bandwidth_monitor import BandwidthMonitor
from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.link_use import LARGEST_BUCKET_BYTES, links_of_islands, uplinks_downlinks_of
from gossamer.autotune.step_monitor import StepMonitor
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.island_search import PAIRS
from gossamer.comm.link_probe import hosts_of, probe
from gossamer.comm.message import ProcessGroups
from gossamer.plan import price_apart, price_of
from gossamer.plan.exchange import (
    CANDIDATES,
    PERIODS,
    Calibration,
    Candidate,
    Decision,
    StepMeasurements,
    StepTimes,
    across_islands,
    choose,
    choose_period,
    written_of,
)
from gossamer.policy import Policy
from gossamer.recipe import EVERY_STEP, PlanMethods, not_used_inside
from gossamer.recipe.plan_methods import ALL_REDUCE
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.profile_step import StepProfile, profile_step
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.trainer_services import Replan
from gossamer.sharding import UnshardOrder
from gossamer.spec.cost import Cost
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges, MethodConfig, Written
from gossamer.spec.network import Network
from gossamer.spec.plan import BUCKET_BYTES, Plan
from gossamer.spec.statistics import Statistics
from gossamer.spec.units import show_seconds
from gossamer.sync import OuterLoopConfig

_REHEARSALS = 3  # batches to try for one with finite gradients
_CUT = ("bucket_bytes", "buckets", "turns")  # fields of a plan that say which buckets are sent, and when


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    """The settings and methods of a run that the choice of its exchanges depends on."""

    lossy: bool
    steps: int  # of the run
    second_moments: bool = False  # whether the optimizer has second moments that islands can average
    policy: Policy | None = None  # for the exchange between islands in local-update training
    walk: UnshardOrder | None = None  # where parameters are sharded


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The batches that were tried for a step profile, and the ranks whose last gradients were not finite.

    With such ranks the compression errors are not known, and no lossy exchange is chosen.
    """

    tried: int = 0
    sick: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class ExchangeSelector:
    """The selection of exchanges on one rank; all ranks must call the same methods between the same steps."""

    engine: ModelRuntime
    feed: Feed
    pump: CommThread
    run: SelectionSettings
    plan: Plan
    tell: Callable[[str, int], None]  # an event: message, step
    keep: Callable[[Plan], None]  # a plan that has changed
    _measured: ExchangeProfile | None = None
    _rehearsal: Rehearsal = field(default_factory=Rehearsal)
    _decision: Decision | None = None
    _facts: tuple[StepMeasurements, ...] = ()  # that the decision is based on, by size of buckets
    _links: Network | None = None
    _slowed: Calibration = field(default_factory=Calibration)  # what steps have shown, beside the profile
    _watch: BandwidthMonitor = field(default_factory=BandwidthMonitor)
    _steps: StepMonitor = field(default_factory=StepMonitor)
    _host: int = -1  # the number of this rank's host; -1: unknown
    _hosts: tuple[tuple[int, ...], ...] = ()  # the ranks of each host, once links were measured; empty where unknown

    def settle(self, *, automatic: bool, hosts: int, host: int = -1) -> Plan:
        """Return the plan for step 1, with exchange and sync chosen if they are `auto`, their reasons and the estimate.

        The plan also gets the islands that its exchange, sharding or sync method needs. `automatic`: choose again when
        links drift; `hosts`: the number of hosts; `host`: that of this rank's, from 0; -1: unknown. All ranks must call
        it.
        """
        asked, several = self.methods, hosts > 1
        self._host = host if several else -1
        if (loop := asked.sync.loop) is not None:
            self._part(loop, hosts)
        elif asked.chooses_exchange and not several:
            why = "every process is on this machine"
            self._adopt("exchange", ALL_REDUCE, f"all-reduce: {why}")
            if asked.chooses_sync:
                self._adopt("sync", EVERY_STEP, f"every step: {why}{self._unlinked}")
        elif asked.chooses_exchange:
            links = self._probe()
            decision = self._choose(links)
            self.tell(f"exchange: {self.plan.reasons['exchange']}", 0)
            if asked.chooses_sync:
                self._choose_period(decision, links)
        elif not self.plan.islands and (asked.exchange.asks_for_islands or (several and self._follows_islands)):
            self._learn(self._probe())
            if self.plan.islands:
                self._reprice()
        if self.run.walk is not None:
            self._reprice()
        self._watch.active = automatic and several and self.methods.sync.is_plain
        self._watch.skip(self.pump)  # exclude messages before training
        self._expect()
        return self.plan

    def waited(self) -> dict[str, float]:
        """Return by parameter the part of its exchange's time that a step waits for; empty if nothing was measured."""
        return {} if self._decision is None else self._decision.waited()

    @property
    def methods(self) -> PlanMethods:
        """Return the methods of the plan as it is now."""
        return PlanMethods.of(self.plan)

    def _adopt(self, field: str, written: Written, reason: str) -> None:
        self.plan = self.plan.model_copy(update={field: written, "reasons": {**self.plan.reasons, field: reason}})

    def _choose_period(self, decision: Decision, links: Network) -> None:
        """Choose between synchronous and local-update training."""
        assert self._measured is not None
        links = links_of_islands(links, self.plan.islands) if self.plan.islands else links
        islands = self.plan.islands or tuple((rank,) for rank in self.pump.channel.levels.everyone)
        periods = [period for period in PERIODS if bool(period.second_moments) == self.run.second_moments]
        first = written_of(periods[0], 1, self.run.steps)  # all of them send the same in a round
        loop = self.methods.under(sync=first).sync.loop
        assert loop is not None
        cut, levels = min(BUCKET_BYTES, self._largest_bytes), ProcessGroups.islands(islands)
        facts = self._measured.round_facts(loop, links, levels, self.plan.units, cut)
        chosen = choose_period(decision, facts, steps=self.run.steps, lossy=self.run.lossy, periods=periods)
        self._adopt("sync", chosen.sync or EVERY_STEP, chosen.reason)
        self.tell(f"sync: {chosen.reason}", 0)
        if (loop := self.methods.sync.loop) is not None and chosen.forecast is not None:
            self._part_into(islands)
            self._price_apart(loop, step_s=chosen.forecast.step_s, exposed_s=chosen.forecast.exposed_s)

    @property
    def _follows_islands(self) -> bool:
        """Return whether sharded states follow the islands, if any; sharded parameters do only if asked to."""
        sharding = self.methods.sharding
        return sharding.is_sharded and (sharding.needs_islands or not sharding.takes_parameters)

    def _part(self, loop: OuterLoopConfig, hosts: int) -> None:
        """Set up local-update training: islands as given, else as the links suggest, else one per rank."""
        self._part_into(self.plan.islands or self._islands(hosts))
        later = f", from step {loop.steady} on" if loop.warmup.local_step_scaler else ""
        when = f"every {loop.sync_every} steps{later}"
        said = f"{len(self.plan.islands)} islands {[list(i) for i in self.plan.islands]} meet {when}"
        round_s = 0.0
        if loop.local_steps:
            loop, round_s, each = self._paced(loop)
            said += f": {each}, {round_s:.3g} s of computing a round"
        if self.methods.sharding.is_sharded:
            said += f"; in each, states are shared out among {min(map(len, self.plan.islands))} of its ranks"
        if self.run.policy is not None:
            loop = self._by_ways(loop, self.run.policy)
        self._price_apart(loop, compute_s=round_s / loop.sync_every, state_bytes=self.plan.forecast.state_bytes)
        self._adopt("sync", self.plan.sync, said)
        self.tell(f"sync: {said}", 0)
        if unused := not_used_inside(loop, self.plan.islands, self.plan.exchange):
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
        forecast = price_apart(loop, self.methods, shapes, self.pump.channel.levels)
        self.plan = self.plan.model_copy(update={"forecast": forecast.model_copy(update=known)})

    def _paced(self, loop: OuterLoopConfig) -> tuple[OuterLoopConfig, float, str]:
        """Return the loop with each island's steps per round, the seconds of a round, and a description.

        An island is as fast as its slowest rank.
        """
        mine = profile_step(self.engine, self.feed, trainable(self.engine.module)).compute_s
        by_rank = gathered(self.pump.channel, [mine])[:, 0].tolist()
        islands = self.plan.islands
        seconds = [max(by_rank[rank] for rank in island) for island in islands]
        if loop.local_steps == "auto":
            loop = self._with(local_steps=list(sync.by_speed(seconds, loop.sync_every)))
        pairs = list(zip(loop.steps_of(islands), seconds, strict=True))
        said = ", ".join(
            f"{list(island)} makes {n} of {s:.3g} s" for island, (n, s) in zip(islands, pairs, strict=True)
        )
        return loop, max(n * s for n, s in pairs), said

    def _by_ways(self, loop: OuterLoopConfig, policy: Policy) -> OuterLoopConfig:
        """Return the loop with the exchange that the policy chooses from the current uplinks and downlinks."""
        islands = self.plan.islands
        if any(len(island) > 1 for island in islands):
            raise bad_input(
                wanted="islands of one rank each, for a policy with local updates",
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
        """Return the outer loop with other settings, and write them to the plan."""
        choice = MethodConfig.parse(self.plan.sync)
        written = MethodConfig(choice.name, {**choice.parameters, **parameters}).written()
        self.plan = self.plan.model_copy(update={"sync": written})
        loop = self.methods.sync.loop
        assert loop is not None
        return loop

    def _islands(self, hosts: int) -> tuple[tuple[int, ...], ...]:
        everyone = self.pump.channel.levels.everyone
        if hosts > 1:
            if (links := self._probe()).has_islands:
                return links.islands
            if len(everyone) > PAIRS and self._hosts:  # so many ranks apart would average little
                return self._hosts
        return tuple((rank,) for rank in everyone)

    def replan(self, step: int, compute_s: float, exposed_s: float) -> Replan | None:
        """Return a better exchange between two steps if links have drifted or steps differ from their forecast.

        None for no change. `compute_s`, `exposed_s`: what the step that has ended computed, and waited for messages.
        All ranks must call it after the same step.
        """
        self._steps.note(compute_s, exposed_s)
        if not self._watch.due(step):
            return None
        drifted, times = self._watch.drifted(self._watch.window(self.pump)), self._steps.window(self.pump)
        if drifted:
            before = self.plan
            self._choose(self._probe(), step)
            self._watch.begin_anew(self.pump)
            changed = self._replaced(before, step, "the links have drifted")
            self._expect()
            return changed
        return self._recalibrated(step, times) if self._steps.is_off(times) else None

    def _recalibrated(self, step: int, times: StepTimes) -> Replan | None:
        """Correct the measurements by what steps took, and return what is then worth a change."""
        assert self._decision is not None and self._links is not None and self._steps.expected is not None
        said = f"steps {_told(times)}, expected: {_told(self._steps.expected)}"
        best, before = self._decision.best, self.plan
        found = Calibration.fit(best.facts, best.picked, times)
        self._slowed = self._slowed.then(found)
        self._facts = tuple(found.applied(one) for one in self._facts)
        decision, now = self._decide(self._links), best.on(found.applied(best.facts))
        said += f" ({found.show()})"
        if decision.written != before.exchange and decision.replaces(now):
            if (changed := self._replaced(before, step, said)) is not None:
                self._watch.begin_anew(self.pump)
                self._expect()
                return changed
        else:
            self.plan = before  # with the forecast that its exchange was chosen by
            self.tell(f"{said}; the exchange stays", step)
        self._decision = replace(decision, best=now)
        self._steps.begin_anew(self.pump, times)
        return None

    def _expect(self) -> None:
        """Expect steps as the decision forecasts them, where its buckets are sent and nothing else is waited for.

        Nothing is expected of a device that computes beside the host, whose clock does not say what a step computes.
        """
        plan, decision = self.plan, self._decision
        waits = plan.mesh.in_stages or self.methods.sharding.is_sharded or not self.methods.sync.is_plain
        waits |= self.engine.device.type != "cpu"
        if waits or plan.adapted_from or decision is None or plan.buckets != decision.buckets:
            self._steps.begin_anew(self.pump, None)
        else:
            self._steps.begin_anew(self.pump, StepTimes.forecast(decision.best.facts, decision.best.picked))

    def _replaced(self, before: Plan, step: int, why: str) -> Replan | None:
        """Return the change from the plan `before` to the exchange just chosen; None where that is the same."""
        chosen, cut = self.plan.exchange, {name: getattr(self.plan, name) for name in _CUT}
        in_force = {name: getattr(before, name) for name in ("exchange", "adapted_from", *_CUT)}
        self.plan = self.plan.model_copy(update=in_force)
        said = f"{why}; exchange: {self.plan.reasons['exchange']}"
        if chosen not in (before.exchange, before.adapted_from):
            changed = self.change(chosen, step, said, adapted_from="", cut=cut)
            if changed is not None:
                return changed
        self._reprice()  # the current exchange stays, with its adaptations
        self.keep(self.plan)
        self.tell(said, step)
        return None

    def change(
        self,
        written: Exchanges,
        step: int,
        said: str,
        *,
        adapted_from: Exchanges,
        cut: Mapping[str, object] = MappingProxyType({}),
    ) -> Replan | None:
        """Change to the exchange `written` between two steps; return the change, or None if it is already in use.

        Parameters whose current exchange keeps a residual get error feedback, so that no residual is lost.
        `cut`: new buckets and turns, as fields of the plan; by default they stay. `said`: the event for the user;
        `adapted_from`: the exchange that was adapted, "" for none.
        """
        params = trainable(self.engine.module)
        methods = self.methods
        before, after = (one.exchange.by_name(params) for one in (methods, methods.under(exchange=written)))
        lacking = [
            n
            for n in params
            if exchange_methods.has_residual(before[n]) and not exchange_methods.has_residual(after[n])
        ]
        written = exchange_methods.with_error_feedback(written, lacking)
        if written == self.plan.exchange:
            return None
        self.plan = self.plan.model_copy(update={"exchange": written, "adapted_from": adapted_from, **cut})
        self._reprice()
        self._watch.forget()
        self._steps.expected = None  # of another exchange nothing is forecast
        self.keep(self.plan)
        self.tell(said, step)
        plan = self.plan
        return Replan(self.methods.exchange.by_name(params), plan.bucket_bytes, plan.buckets, plan.turns)

    def _reprice(self) -> None:
        """Update the estimated bytes of a step, for the links as known now."""
        cost = self._price(self.plan.exchange)
        said = {"wire_bytes": cost.wire_bytes, "sent_bytes": cost.sent_bytes}
        self.plan = self.plan.model_copy(update={"forecast": self.plan.forecast.model_copy(update=said)})

    def _price(self, written: Exchanges) -> Cost:
        shapes = tuple((name, tuple(p.shape)) for name, p in trainable(self.engine.module).items())
        methods = self.methods.under(exchange=written)
        return price_of(methods, shapes, self.pump.channel.levels, walk=self.run.walk)

    def links(self) -> Network:
        """Return the links as they are now. The probe takes some seconds, between two steps."""
        links = self._probe(ways=True)
        self._watch.skip(self.pump)  # exclude the probe's messages
        return links

    def _probe(self, *, ways: bool = False) -> Network:
        """Measure the links. All ranks call it together; the first call gathers which ranks share a host."""
        if self._host >= 0 and not self._hosts:
            self._hosts = hosts_of(self.pump.channel, self._host)
        return probe(self.pump.channel, ways=ways, hosts=self._hosts)

    def _learn(self, links: Network) -> None:
        if links.has_islands and not self.plan.islands:
            self.plan = self.plan.model_copy(update={"islands": links.islands})
            self.pump.channel.widen(ProcessGroups.islands(links.islands))

    def _choose(self, links: Network, step: int = 0) -> Decision:
        """Choose the exchange and update the plan. `step`: the batch to profile, if no gradients are known yet."""
        self._learn(links)
        self._links = links_of_islands(links, self.plan.islands)
        facts = self._measure(step).facts(self._links, self._candidates, self._largest_bytes)
        self._facts = tuple(self._slowed.applied(one) for one in facts)
        return self._decide(self._links)

    @property
    def _candidates(self) -> tuple[Candidate, ...]:
        return across_islands(CANDIDATES) if self.plan.islands else CANDIDATES

    def _decide(self, links: Network) -> Decision:
        """Choose by the measurements there are, and update the plan."""
        assert self._measured is not None
        knows = self._measured.knows
        self._decision = decision = choose(*self._facts, lossy=self.run.lossy and knows, candidates=self._candidates)
        self.plan = self.plan.model_copy(update={"buckets": decision.buckets, "turns": decision.turns})
        self.plan = _planned(self.plan, decision, links, self._price(decision.written), self._unknown)
        return decision

    @property
    def _largest_bytes(self) -> int:
        """Return the most bytes of a bucket: with sharded states those of the plan, whose memory it has counted."""
        return self.plan.bucket_bytes if self.methods.sharding.is_sharded else LARGEST_BUCKET_BYTES

    @property
    def _unlinked(self) -> str:
        """Return a note on islands that are given, though one machine has no links between them to choose by."""
        if not self.plan.islands:
            return ""
        given = [list(island) for island in self.plan.islands]
        return f"; machines.islands {given} share it, so no link between them was measured: name plan.sync to part them"

    @property
    def _unknown(self) -> str:
        """Return a note on measurements that the choice lacks."""
        if not self._rehearsal.sick:
            return ""
        return (
            f"; gradients of {self._rehearsal.tried} batches were not finite on ranks {list(self._rehearsal.sick)}: "
            "the error of lossy exchanges is not known, so only exact ones and bf16 were candidates"
        )

    def _measure(self, step: int) -> ExchangeProfile:
        """Return the profile, measured once; compression errors are measured again while they are unknown."""
        if self._measured is None or not self._measured.knows:
            params = trainable(self.engine.module)
            profile, self._rehearsal = self._rehearsed(step)
            self._measured = ExchangeProfile.by(profile, params, CANDIDATES, self.pump, knows=not self._rehearsal.sick)
        return self._measured

    def _rehearsed(self, step: int) -> tuple[StepProfile, Rehearsal]:
        """Profile the first batch from `step` on whose gradients are finite on all ranks; return also what was tried.

        After a few batches the last one is returned. One bad batch is harmless: its step will be rejected and retried.
        """
        params, channel = trainable(self.engine.module), self.pump.channel
        for batch in range(step, step + _REHEARSALS):
            profile = profile_step(self.engine, self.feed, params, batch)
            is_finite = all(bool(torch.isfinite(g).all()) for g in profile.gradients.values())
            sound = gathered(channel, [float(is_finite)])[:, 0].tolist()
            sick = tuple(rank for rank, ok in zip(channel.levels.everyone, sound, strict=True) if not ok)
            if not sick:
                break
        return profile, Rehearsal(batch - step + 1, sick)


def _told(times: StepTimes) -> str:
    return f"compute {show_seconds(times.compute_s)} and wait {show_seconds(times.exposed_s)}"


def _planned(plan: Plan, decision: Decision, links: Network, cost: Cost, beside: str) -> Plan:
    link = links.levels.get("between", links.levels["all"])
    said = f"{decision.reason}{beside} (links: {link.show()})"
    line = decision.forecast
    times = {name: getattr(line, name) for name in ("step_s", "compute_s", "wire_s", "exposed_s")}
    return plan.model_copy(
        update={
            "exchange": decision.written,
            "reasons": {**plan.reasons, "exchange": said},
            "forecast": cost.model_copy(update={"state_bytes": plan.forecast.state_bytes, **times}),
        }
    )
