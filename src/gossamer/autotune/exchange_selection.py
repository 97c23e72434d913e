"""Choose the exchange of `plan.exchange: auto` with all ranks present, and choose again when the links have drifted.

All measurements are first combined over the ranks (the slowest counts), and the solver in `plan` is a pure function of
them. So all ranks make the same plan without a coordinator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

from gossamer.autotune.bandwidth_monitor import BandwidthMonitor
from gossamer.autotune.choice_basis import ChoiceBasis
from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.link_use import LARGEST_BUCKET_BYTES, links_of_islands
from gossamer.autotune.local_updates import LocalUpdates
from gossamer.autotune.measured_links import MeasuredLinks
from gossamer.autotune.message_price import message_price
from gossamer.autotune.owed_residuals import owing_under, with_owed
from gossamer.autotune.rehearsal import Rehearsal, rehearse
from gossamer.autotune.same_arithmetic import computes_alike
from gossamer.autotune.step_monitor import StepMonitor
from gossamer.autotune.step_remainder import StepRemainder
from gossamer.autotune.trial_steps import RIVAL, Trial, Trials, TrialSteps
from gossamer.autotune.unequal_ranks import UnequalRanks
from gossamer.comm import slow_start
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.island_search import PAIRS
from gossamer.comm.link_probe import hosts_of
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.optimizer import Optimizer
from gossamer.plan import price_of
from gossamer.plan.exchange import (
    CANDIDATES,
    PERIODS,
    Calibration,
    Decision,
    MessagePrice,
    StepTimes,
    across_islands,
    alike_anywhere,
    choose_period,
    written_of,
)
from gossamer.policy import Policy
from gossamer.recipe import EVERY_STEP, PlanMethods
from gossamer.recipe.plan_methods import ALL_REDUCE
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.trainer_services import Replan
from gossamer.sharding import RowPartition, UnshardOrder
from gossamer.spec.cost import Cost
from gossamer.spec.method_config import Exchanges, told
from gossamer.spec.network import Network
from gossamer.spec.plan import BUCKET_BYTES, Plan

_CUT = ("bucket_bytes", "buckets", "turns")  # fields of a plan that say which buckets are sent, and when
_LOOKS = 3  # at gradients of later steps, where those of the first ones were not finite
_DRIFTED = "the links have drifted"
_UNKNOWN = "the links were measured, as those of the start before are not known"
_FED_BACK = "; in error feedback, which sends what was owed before"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    """The settings and methods of a run that the choice of its exchanges depends on."""

    lossy: bool
    steps: int  # of the run
    second_moments: bool = False  # whether the optimizer has second moments that islands can average
    policy: Policy | None = None  # for the exchange between islands in local-update training
    walk: UnshardOrder | None = None  # where parameters are sharded
    optimizer: Optimizer | None = None  # None: updates are not forecast
    trials: TrialSteps | None = None  # None: choices are not tried before training


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
    _params: Mapping[str, Tensor] = field(init=False)  # those of the run: code may freeze some in mid-run
    _basis: ChoiceBasis | None = None  # of the decision
    _decision: Decision | None = None
    _price_of_messages: MessagePrice | None = None
    _remainder: StepRemainder | None = None
    _dealt: RowPartition | None = None  # the rows of each rank, once states are dealt
    _watch: BandwidthMonitor = field(default_factory=BandwidthMonitor)
    _steps: StepMonitor = field(default_factory=StepMonitor)
    _unequal: UnequalRanks = field(default_factory=UnequalRanks)
    _links: MeasuredLinks = field(default_factory=MeasuredLinks)
    _alike: bool = True  # whether ranks compute the same bits from the same numbers
    _looks: int = 0  # at gradients in mid-run, where those before the first step were not finite

    def __post_init__(self) -> None:
        self._params = trainable(self.engine.module)

    def settle(self, *, automatic: bool, hosts: int, host: int = -1, owed: frozenset[str] = frozenset()) -> Plan:
        """Return the plan for step 1, with exchange and sync chosen if they are `auto`, their reasons and the estimate.

        The plan also gets the islands that its exchange, sharding or sync method needs. `automatic`: choose again when
        links drift; `hosts`: the number of hosts; `host`: that of this rank's, from 0; -1: unknown; `owed`: parameters
        with a residual from before. All ranks must call it.
        """
        asked, several = self.methods, hosts > 1
        if several and host >= 0:
            self._links.hosts = hosts_of(self.pump.channel, host)
        if (loop := asked.sync.loop) is not None:
            islands = self.plan.islands or self._islands(hosts)
            self.plan = self._local_updates().part(loop, islands, self.run.policy, self.links)
        elif asked.chooses_exchange and not several:
            why = "every process is on this machine"
            self._adopt("exchange", ALL_REDUCE, f"all-reduce: {why}")
            self._keep_owed(owed)
            if asked.chooses_sync:
                self._adopt("sync", EVERY_STEP, f"every step: {why}{self._unlinked}")
        elif asked.chooses_exchange:
            links = self._links.find(self.pump.channel)
            self._choose(links)
            decision = self._tried()
            self._keep_owed(owed)
            self.tell(f"exchange: {self.plan.reasons['exchange']}", 0)
            if pauses := slow_start.told(self.pump.channel, links, decision.forecast.compute_s):
                self.tell(f"links: {pauses}", 0)
            if asked.chooses_sync:
                self._choose_period(decision, links)
            elif "sync" in self.plan.reasons:  # auto was asked for, and the laws leave nothing to choose
                self.tell(f"sync: {self.plan.reasons['sync']}", 0)
        elif not self.plan.islands and (asked.exchange.asks_for_islands or (several and self._follows_islands)):
            self._learn(self._links.find(self.pump.channel))
            if self.plan.islands:
                self._reprice()
        self._dealt = self._deal  # with what is known now: islands that the links show later deal nothing anew
        if self.run.walk is not None:
            self._reprice()
        self._watch.active = automatic and several and self.methods.sync.is_plain
        self._watch.skip(self.pump)  # exclude messages before training
        self._expect()
        if self._watch.active and self._decision is None:
            self._expect_as_planned()
        return self.plan

    def waited(self) -> dict[str, float]:
        """Return by parameter the part of its exchange's time that a step waits for; empty if nothing was measured."""
        return {} if self._decision is None else self._decision.waited()

    @property
    def methods(self) -> PlanMethods:
        """Return the methods of the plan as it is now."""
        return PlanMethods.of(self.plan)

    def _adopt(self, field: str, written: Exchanges, reason: str) -> None:
        self.plan = self.plan.model_copy(update={field: written, "reasons": {**self.plan.reasons, field: reason}})

    def _keep_owed(self, owed: frozenset[str]) -> None:
        """Give error feedback to the parameters `owed` whose chosen exchange has none: it sends their residual."""
        plan, methods = self.plan, self.methods
        written = with_owed(plan.exchange, methods, self._params, owed)
        if written != plan.exchange:
            self._adopt("exchange", written, plan.reasons["exchange"] + _FED_BACK)

    def _choose_period(self, decision: Decision, links: Network) -> None:
        """Choose between synchronous and local-update training."""
        assert self._basis is not None
        links = links_of_islands(links, self.plan.islands) if self.plan.islands else links
        islands = self.plan.islands or tuple((rank,) for rank in self.pump.channel.levels.everyone)
        periods = [period for period in PERIODS if bool(period.second_moments) == self.run.second_moments]
        first = written_of(periods[0], 1, self.run.steps)  # all of them send the same in a round
        loop = self.methods.under(sync=first).sync.loop
        assert loop is not None
        cut, levels = min(BUCKET_BYTES, self._largest_bytes), ProcessGroups.islands(islands)
        slowed = replace(self._basis.slowed, messages=self._basis.messages)
        facts = self._basis.profile.round_facts(loop, links, levels, self.plan.units, cut).corrected(slowed)
        update_s = self._remainder.update_s if self._remainder else 0.0
        facts, now = replace(facts, step_s=facts.step_s + update_s), self.plan.forecast
        chosen = choose_period(decision, facts, now=now, steps=self.run.steps, lossy=self.run.lossy, periods=periods)
        self._adopt("sync", chosen.sync or EVERY_STEP, chosen.reason)
        self.tell(f"sync: {chosen.reason}", 0)
        if (loop := self.methods.sync.loop) is not None and chosen.forecast is not None:
            apart = self._local_updates()
            apart.part_into(islands)
            line = chosen.forecast
            apart.price(
                loop,
                step_s=line.step_s,
                compute_s=line.step_s - line.exposed_s - update_s,
                exposed_s=line.exposed_s,
                update_s=update_s,
                state_bytes=self.plan.forecast.state_bytes,
            )
            self.plan = apart.plan

    def _local_updates(self) -> LocalUpdates:
        return LocalUpdates(
            plan=self.plan, engine=self.engine, feed=self.feed, channel=self.pump.channel, tell=self.tell
        )

    @property
    def _follows_islands(self) -> bool:
        """Return whether sharded states follow the islands, if any; sharded parameters do only if asked to."""
        sharding = self.methods.sharding
        return sharding.is_sharded and (sharding.needs_islands or not sharding.takes_parameters)

    @property
    def _deal(self) -> RowPartition:
        """Return the rows of each rank: as the process groups suggest, until the states are dealt as in `settle`."""
        return self._dealt or self.methods.sharding.deal(self.pump.channel.levels)

    def _islands(self, hosts: int) -> tuple[tuple[int, ...], ...]:
        """Return the islands that the links suggest, else the hosts of many ranks, else one per rank."""
        everyone = self.pump.channel.levels.everyone
        if hosts > 1:
            if (links := self._links.find(self.pump.channel)).has_islands:
                return links.islands
            if len(everyone) > PAIRS and self._links.hosts:  # so many ranks apart would average little
                return self._links.hosts
        return tuple((rank,) for rank in everyone)

    def replan(self, step: int, compute_s: float, exposed_s: float) -> Replan | None:
        """Return a better exchange between two steps if links have drifted or steps differ from their forecast.

        None for no change. `compute_s`, `exposed_s`: what the step that has ended computed, and waited for messages.
        All ranks must call it after the same step.
        """
        if not self._watch.active:
            return None
        self._steps.note(compute_s, exposed_s)
        if not self._watch.due(step):
            return None
        is_first, is_known = self._watch.first is None, self._links.is_known
        drifted = self._watch.drifted(self._watch.window(self.pump))
        times, by_rank = self._steps.window(self.pump)
        if self._tells_machines and (unequal := self._unequal.later(by_rank, self.plan)):
            self.tell(f"machines: {unequal}", step)
        if self._can_rehearse:
            if (links := self._changed_links(drifted, is_first)) is not None:
                return self._chosen_anew(links, step, _DRIFTED if drifted or is_known else _UNKNOWN)
            if self._looks_again:
                return self._chosen_anew(self._links.find(self.pump.channel), step, "gradients are looked at again")
        if drifted:
            why = "with sharded parameters, gradients are looked at before training alone, in a run that chooses then"
            self.tell(f"the links have drifted; the exchange stays: {why}", step)
            self._watch.begin_anew(self.pump)
            return None
        if not self._steps.is_off(times):
            return None
        if self._decision is not None:
            return self._recalibrated(step, times)
        assert self._steps.expected is not None  # by the plan of an earlier start
        why = f"steps {times.show()}, expected by the plan: {self._steps.expected.show()}"
        return self._chosen_anew(self._links.find(self.pump.channel), step, why)

    def _chosen_anew(self, links: Network, step: int, why: str) -> Replan | None:
        """Choose for these links between two steps, and return the change if it is worth one."""
        before, in_force = self.plan, self._decision
        self._choose(links, step)
        self._watch.begin_anew(self.pump)
        changed = self._replaced(before, step, why, in_force)
        self._expect()
        return changed

    @property
    def _looks_again(self) -> bool:
        """Return whether a choice is due because gradients were not finite before the first step; a few times."""
        is_blind = self.run.lossy and self._basis is not None and not self._basis.profile.knows
        if not is_blind or self._looks == _LOOKS:
            return False
        self._looks += 1
        return True

    @property
    def _tells_machines(self) -> bool:
        """Return whether the host's clock says what a step computes, alone."""
        return self.engine.device.type == "cpu" and not self.methods.sharding.takes_parameters

    def _changed_links(self, drifted: bool, is_first: bool) -> Network | None:
        """Return the links as they are now, if they have changed since the choice.

        `drifted`: whether windows of steps say so; `is_first`: whether the window that has ended is the first since the
        choice, with which the next ones are compared.
        """
        if drifted:
            return self._links.find(self.pump.channel)
        if not is_first:
            return None
        changed = self._links.look_again(self.pump.channel, self.plan.islands)
        self._watch.skip(self.pump)  # exclude the probe's messages
        return changed

    @property
    def _can_rehearse(self) -> bool:
        """Return whether what a choice is based on is known, or can be measured between two steps.

        A step of sharded parameters cannot: between steps a rank holds a part of them.
        """
        is_known = self._basis is not None and self._basis.profile.knows
        return is_known or not self.methods.sharding.takes_parameters

    def _tried(self) -> Decision:
        """Time steps with the choice, correct the measurements by them, and choose again; return the best one tried."""
        assert self._decision is not None and self._basis is not None
        steps, trials, rehearsal = self.run.trials, Trials(self.run.steps), self._basis.rehearsal
        corrected = list[ChoiceBasis]()  # by each trial
        is_tried = self._is_comparable and trials.have_time_for(self._decision) and not rehearsal.sick
        if steps is None or not is_tried:
            return self._decision
        before_s = steps.alone_s(rehearsal.batch)
        while True:
            times, after_s = steps.times(self.plan, rehearsal.batch), steps.alone_s(rehearsal.batch)
            one, before_s = Trial.of(self._decision, times, (before_s + after_s) / 2), after_s
            trials = trials.and_then(one)
            self.tell(f"exchange: {one.show()}", 0)
            corrected.append(self._basis.corrected(one.slower))
            self._basis = corrected[-1].corrected(one.until(trials.alone_s))
            following = trials.following(self._basis.fastest(), self._basis.uniform(RIVAL))
            if following is None:
                best = trials.best
                usual = best.until(trials.alone_s)
                # What is chosen from later is to be timed by the same steps as the choice itself.
                basis = next(b for b, trial in zip(corrected, trials.made, strict=True) if trial is best)
                self._basis = basis.corrected(usual)
                return self._settle_on(self._basis.told(best.decision.corrected(usual)))
            self._settle_on(following)

    def _recalibrated(self, step: int, times: StepTimes) -> Replan | None:
        """Correct the measurements by what steps took, and return what is then worth a change."""
        assert self._decision is not None and self._basis is not None and self._steps.expected is not None
        said = f"steps {times.show()}, expected: {self._steps.expected.show()}"
        best, before = self._decision.best, self.plan
        found = Calibration.fit(best.facts, best.picked, times)
        self._basis = self._basis.corrected(found)
        decision, now = self._settle_on(self._basis.fastest()), best.on(found.applied(best.facts))
        said, in_force = f"{said} ({found.show()})", replace(decision, best=now)
        is_same = decision.written == before.exchange and decision.buckets == before.buckets
        if self._all_say(not is_same and decision.replaces(now)):
            if (changed := self._replaced(before, step, said, in_force)) is not None:
                self._watch.begin_anew(self.pump)
                self._expect()
                return changed
        else:
            self.plan = before  # with the forecast that its exchange was chosen by
            self.tell(f"{said}; the exchange stays", step)
        self._decision = in_force
        self._steps.begin_anew(self.pump, times)
        return None

    def _expect(self) -> None:
        """Expect steps as the decision forecasts them, where its buckets are sent and nothing else is waited for.

        Nothing is expected of a device that computes beside the host, whose clock does not say what a step computes.
        """
        plan, decision = self.plan, self._decision
        is_comparable = self._is_comparable and self.methods.sync.is_plain and not plan.adapted_from
        if not is_comparable or decision is None or plan.buckets != decision.buckets:
            self._steps.begin_anew(self.pump, None)
        else:
            self._steps.begin_anew(self.pump, StepTimes.forecast(decision.best.facts, decision.best.picked))

    def _expect_as_planned(self) -> None:
        """Expect steps as an earlier start has forecast them, of whose links and step nothing else is known here.

        Where steps cannot be compared with that, the links are measured and chosen for after the first window.
        """
        line = self.plan.forecast
        if not self._is_comparable or self.plan.adapted_from or not line.compute_s:
            self._links.doubt()
        else:
            self._steps.begin_anew(self.pump, StepTimes(line.compute_s, line.exposed_s, encode_s=0.0))

    @property
    def _is_comparable(self) -> bool:
        """Return whether a step computes on the host and waits for nothing but the buckets of its gradients."""
        return (
            not self.plan.mesh.in_stages and not self.methods.sharding.is_sharded and self.engine.device.type == "cpu"
        )

    def _replaced(self, before: Plan, step: int, why: str, in_force: Decision | None) -> Replan | None:
        """Return the change from the plan `before` to the exchange just chosen; None where that is the same.

        What stays keeps its buckets, adaptations and error feedback, and has its own forecast: that of the decision
        `in_force`, by the measurements as they are now. Where they have none of it, its forecast is the one from before
        and steps are not compared with it: what they would show is of other links than the measurements.
        """
        decision, chosen, cut = self._decision, self.plan.exchange, {name: getattr(self.plan, name) for name in _CUT}
        kept = {name: getattr(before, name) for name in ("exchange", "adapted_from", *_CUT)}
        assert decision is not None and self._basis is not None
        again = None if in_force is None else self._basis.again(decision, in_force)
        if in_force is None and (decision.written, decision.buckets) == (before.exchange, before.buckets):
            again = decision
        if before.adapted_from:
            is_worth = chosen not in (before.exchange, before.adapted_from)
        elif again is None:
            is_worth = chosen != before.exchange
        else:
            is_worth = decision.replaces(again.best)
        if self._all_say(is_worth) and self._all_chose(chosen, cut):
            self.plan = self.plan.model_copy(update=kept)
            said = f"{why}; exchange: {self.plan.reasons['exchange']}"
            changed = self.change(chosen, step, said, adapted_from="", cut=cut)
            if changed is not None:
                return changed
        # The islands that the links have shown stay known: the channel has their process groups.
        self.plan, self._decision = before.model_copy(update={"islands": self.plan.islands}), None
        if again is not None and before.adapted_from:
            self._decision = again  # of what was adapted, for what its parameters wait for
        elif again is not None and self._fed_back(again.written, {}) == before.exchange:
            self._settle_on(again)
            if again.written != before.exchange:
                self._adopt("exchange", before.exchange, self.plan.reasons["exchange"] + _FED_BACK)
            self.plan = self.plan.model_copy(update=kept)
        said = f"the exchange stays: {self.plan.reasons.get('exchange', told(before.exchange))}"
        if self._decision is None:
            said += "; what its steps take on the links as they are is not known"
        self._reprice()
        self.keep(self.plan)
        self.tell(f"{why}; {said}", step)
        return None

    def _all_say(self, is_so: bool) -> bool:
        """Return whether all ranks find so; they do alike, but versions of Python may round a sum of floats unlike."""
        return bool(gathered(self.pump.channel, [float(is_so)]).min() > 0)

    def _all_chose(self, chosen: Exchanges, cut: Mapping[str, object]) -> bool:
        """Return whether all ranks have chosen the same; what they do not agree about is not begun."""
        text = json.dumps([chosen, {name: cut[name] for name in sorted(cut)}], sort_keys=True).encode()
        mine = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")  # exact in float64
        return len(set(gathered(self.pump.channel, [mine])[:, 0].tolist())) == 1

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
        asked, written = written, self._fed_back(written, cut)
        if (written, *cut.values()) == (self.plan.exchange, *(getattr(self.plan, name) for name in cut)):
            return None
        self.plan = self.plan.model_copy(update={"exchange": written, "adapted_from": adapted_from, **cut})
        if written != asked:
            said += _FED_BACK
            self._adopt("exchange", written, self.plan.reasons.get("exchange", told(asked)) + _FED_BACK)
        self._reprice()
        self._watch.forget()
        self._watch.skip(self.pump)  # exclude messages of the exchange before
        self._steps.expected = None  # of another exchange nothing is forecast
        self.keep(self.plan)
        self.tell(said, step)
        plan = self.plan
        return Replan(self.methods.exchange.by_name(self._params), plan.bucket_bytes, plan.buckets, plan.turns)

    def _fed_back(self, written: Exchanges, cut: Mapping[str, object]) -> Exchanges:
        """Return `written`, in buckets as in `cut`, with error feedback where the plan's exchange keeps a residual."""
        methods = self.methods
        read = methods.under(exchange=written, **cut)
        return with_owed(written, read, self._params, owing_under(methods, self._params))

    def _reprice(self) -> None:
        """Update the estimated bytes of a step, for the links as known now."""
        cost = self._price(self.plan.exchange)
        said = {"wire_bytes": cost.wire_bytes, "sent_bytes": cost.sent_bytes}
        self.plan = self.plan.model_copy(update={"forecast": self.plan.forecast.model_copy(update=said)})

    def _price(self, written: Exchanges) -> Cost:
        shapes = tuple((name, tuple(p.shape)) for name, p in self._params.items())
        methods = self.methods.under(exchange=written)
        return price_of(methods, shapes, self.pump.channel.levels, walk=self.run.walk, deal=self._deal)

    def links(self) -> Network:
        """Return the links as they are now. The probe takes some seconds, between two steps."""
        links = self._links.find(self.pump.channel, ways=True)
        self._watch.skip(self.pump)  # exclude the probe's messages
        return links

    def _learn(self, links: Network, step: int = 0) -> None:
        """Take the islands that the links show, if the plan has none; tell of those that it contradicts, once."""
        shown, kept = links.islands, self.plan.islands
        if links.has_islands and not kept:
            self.plan = self.plan.model_copy(update={"islands": shown})
            self.pump.channel.widen(ProcessGroups.islands(shown))
        elif self._links.contradicts(links, kept):
            self.tell(f"the links show the islands {_listed(shown)}; the plan keeps {_listed(kept)}", step)

    def _choose(self, links: Network, step: int = 0) -> Decision:
        """Choose the exchange and update the plan. `step`: the batch to profile, if no gradients are known yet."""
        self._learn(links, step)
        # Right after a choice in mid-run links may change again, and where steps are not compared none shows it.
        self._links.choose_for(links, may_change=step > 0 or not self._is_comparable)
        profile, rehearsal = self._profiled(step)
        candidates = CANDIDATES if self._alike else alike_anywhere(CANDIDATES)
        is_same = self._basis is not None and profile is self._basis.profile
        self._basis = ChoiceBasis.of(
            profile,
            rehearsal,
            links_of_islands(links, self.plan.islands),
            across_islands(candidates) if self.plan.islands else candidates,
            largest_bytes=self._largest_bytes,
            price=self._priced(links),
            divides=not self.methods.sharding.is_sharded and not self.plan.mesh.in_stages,
            lossy=self.run.lossy,
            is_alike=self._alike,
            before=self._basis if is_same else None,  # of a step that is measured anew, steps have shown nothing
        )
        return self._settle_on(self._basis.fastest())

    def _settle_on(self, decision: Decision) -> Decision:
        """Write a decision to the plan, with its reason and estimate."""
        assert self._basis is not None
        self._decision = decision
        self.plan = self.plan.model_copy(update={"buckets": decision.buckets, "turns": decision.turns})
        self.plan = self._basis.planned(self.plan, decision, self._price(decision.written))
        if self._remainder is not None:
            levels = self.pump.channel.levels
            whole = self._remainder.added(self.plan.forecast, self.methods, self._basis, levels)
            self.plan = self.plan.model_copy(update={"forecast": whole})
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
        given = _listed(self.plan.islands)
        return f"; machines.islands {given} share it, so no link between them was measured: name plan.sync to part them"

    def _priced(self, links: Network) -> MessagePrice:
        """Return the price of messages, measured once."""
        if self._price_of_messages is None:
            self._price_of_messages = message_price(self.pump, links, self.engine.device)
        return self._price_of_messages

    def _profiled(self, step: int) -> tuple[ExchangeProfile, Rehearsal]:
        """Return the profile, measured once; compression errors are measured again while they are unknown."""
        if self._basis is not None and self._basis.profile.knows:
            return self._basis.profile, self._basis.rehearsal
        params = trainable(self.engine.module)
        sharding, channel = self.methods.sharding, self.pump.channel
        self._remainder = StepRemainder.measured(
            params, self.run.optimizer, sharding, self._deal, self.run.walk, channel
        )
        self._alike = computes_alike(channel, self.engine.device)
        timed, rehearsal = rehearse(self.engine, self.feed, channel, step)
        seconds = gathered(channel, [timed.compute_s])[:, 0].tolist()
        if unequal := self._unequal.at_start(seconds, self.plan):
            self.tell(f"machines: {unequal}", step)

        def as_sent(one: Exchange) -> Exchange:
            return sharding.exchange(one, self._deal.path)

        found = ExchangeProfile.by(
            timed,
            params,
            CANDIDATES,
            self.pump,
            knows=not rehearsal.sick,
            as_sent=as_sent,
            look_ahead=self.plan.look_ahead if sharding.gives_back else None,
        )
        return found, rehearsal


def _listed(islands: tuple[tuple[int, ...], ...]) -> str:
    return str([list(island) for island in islands])
