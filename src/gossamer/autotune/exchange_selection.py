"""Complete a plan that leaves exchanges, sync or islands open, and choose exchanges again when links have drifted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gossamer.autotune.bandwidth_monitor import BandwidthMonitor
from gossamer.autotune.exchange_chooser import ExchangeChooser, SelectionSettings
from gossamer.autotune.link_use import links_of_islands
from gossamer.autotune.local_updates import LocalUpdates
from gossamer.autotune.measured_links import MeasuredLinks
from gossamer.autotune.owed_residuals import owing_under, with_owed
from gossamer.autotune.step_monitor import StepMonitor
from gossamer.comm import slow_start
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.island_search import PAIRS
from gossamer.comm.link_probe import hosts_of
from gossamer.comm.message import ProcessGroups
from gossamer.plan.exchange import (
    PERIODS,
    Calibration,
    Decision,
    StepTimes,
    choose_period,
    written_of,
)
from gossamer.recipe import EVERY_STEP, PlanMethods
from gossamer.recipe.plan_methods import ALL_REDUCE
from gossamer.run.trainer_services import Replan
from gossamer.spec.method_config import Exchanges, told
from gossamer.spec.network import NO_NETWORK, Network
from gossamer.spec.plan import BUCKET_BYTES, Plan

_CUT = ("bucket_bytes", "buckets", "turns")  # fields of a plan that say which buckets are sent, and when
_LOOKS = 3  # at gradients of later steps, where those of the first ones were not finite
_FED_BACK = "; in error feedback, which sends what was owed before"


@dataclass(slots=True, kw_only=True)
class ExchangeSelector:
    """The selection of exchanges on one rank; all ranks must call the same methods between the same steps."""

    chooser: ExchangeChooser
    plan: Plan
    keep: Callable[[Plan], None]  # a plan that has changed
    _watch: BandwidthMonitor = field(default_factory=BandwidthMonitor)
    _steps: StepMonitor = field(default_factory=StepMonitor)
    _links: MeasuredLinks = field(default_factory=MeasuredLinks)
    _looks: int = 0  # at gradients in mid-run, where those before the first step were not finite

    def settle(self, *, automatic: bool, hosts: int, host: int = -1, owed: frozenset[str] = frozenset()) -> Plan:
        """Return the plan for step 1, with exchange and sync chosen if they are `auto`, their reasons and the estimate.

        The plan also gets the islands that its exchange, sharding or sync method needs. `automatic`: choose again when
        links drift; `hosts`: the number of hosts; `host`: that of this rank's, from 0; -1: unknown; `owed`: parameters
        with a residual from before. All ranks must call it.
        """
        asked, several = self.methods, hosts > 1
        if several and host >= 0:
            self._links.hosts = hosts_of(self._pump.channel, host)
        if (loop := asked.sync.loop) is not None:
            islands = self.plan.islands or self._islands(hosts)
            self.plan = self._local_updates().part(loop, islands, self._run.policy, self.links)
        elif asked.chooses_exchange and not several:
            why = "every process is on this machine"
            self._adopt("exchange", ALL_REDUCE, f"all-reduce: {why}")
            self.plan = self.plan.model_copy(update={"links": {"all": NO_NETWORK}})  # a later start may be on several
            self._keep_owed(owed)
            if asked.chooses_sync:
                self._adopt("sync", EVERY_STEP, f"every step: {why}{self._unlinked}")
        elif asked.chooses_exchange:
            links = self._links.find(self._pump.channel)
            self._choose(links)
            self.plan = self.chooser.try_out(self.plan)
            decision = self.chooser.decision
            assert decision is not None
            self._keep_owed(owed)
            self.tell(f"exchange: {self.plan.reasons['exchange']}", 0)
            if pauses := slow_start.told(self._pump.channel, links, decision.forecast.compute_s):
                self.tell(f"links: {pauses}", 0)
            if asked.chooses_sync:
                self._choose_period(decision, links)
            elif "sync" in self.plan.reasons:  # auto was asked for, and the laws leave nothing to choose
                self.tell(f"sync: {self.plan.reasons['sync']}", 0)
        elif not self.plan.islands and (asked.exchange.asks_for_islands or (several and self._follows_islands)):
            self._learn(self._links.find(self._pump.channel))
            if self.plan.islands:
                self.plan = self.chooser.repriced(self.plan)
        # With what is known now: islands that the links show later deal nothing anew.
        self.chooser.dealt = self.chooser.deal(self.plan)
        if self._run.walk is not None:
            self.plan = self.chooser.repriced(self.plan)
        self._watch.active = automatic and several and self.methods.sync.is_plain
        self._watch.skip(self._pump)  # exclude messages before training
        self._expect()
        if self._watch.active and self._decision is None:
            self._links.doubt(self.plan.links)
        return self.plan

    def tell(self, message: str, step: int) -> None:
        """Tell the user of an event."""
        self.chooser.tell(message, step)

    def waited(self) -> dict[str, float]:
        """Return by parameter the part of its exchange's time that a step waits for; empty if nothing was measured."""
        return {} if self._decision is None else self._decision.waited()

    @property
    def _pump(self) -> CommThread:
        return self.chooser.pump

    @property
    def _run(self) -> SelectionSettings:
        return self.chooser.run

    @property
    def _decision(self) -> Decision | None:
        return self.chooser.decision

    @property
    def methods(self) -> PlanMethods:
        """Return the methods of the plan as it is now."""
        return PlanMethods.of(self.plan)

    def _adopt(self, field: str, written: Exchanges, reason: str) -> None:
        self.plan = self.plan.model_copy(update={field: written, "reasons": {**self.plan.reasons, field: reason}})

    def _keep_owed(self, owed: frozenset[str]) -> None:
        """Give error feedback to the parameters `owed` whose chosen exchange has none: it sends their residual."""
        plan, methods = self.plan, self.methods
        written = with_owed(plan.exchange, methods, self.chooser.params, owed)
        if written != plan.exchange:
            self._adopt("exchange", written, plan.reasons["exchange"] + _FED_BACK)

    def _choose_period(self, decision: Decision, links: Network) -> None:
        """Choose between synchronous and local-update training."""
        assert self.chooser.basis is not None
        links = links_of_islands(links, self.plan.islands) if self.plan.islands else links
        islands = self.plan.islands or tuple((rank,) for rank in self._pump.channel.levels.everyone)
        periods = [period for period in PERIODS if bool(period.second_moments) == self._run.second_moments]
        first = written_of(periods[0], 1, self._run.steps)  # all of them send the same in a round
        loop = self.methods.under(sync=first).sync.loop
        assert loop is not None
        cut, levels = min(BUCKET_BYTES, self.chooser.largest_bytes(self.plan)), ProcessGroups.islands(islands)
        slowed = replace(self.chooser.basis.slowed, messages=self.chooser.basis.messages)
        facts = self.chooser.basis.profile.round_facts(loop, links, levels, self.plan.units, cut).corrected(slowed)
        update_s = self.chooser.remainder.update_s if self.chooser.remainder else 0.0
        facts, now = replace(facts, step_s=facts.step_s + update_s), self.plan.forecast
        chosen = choose_period(decision, facts, now=now, steps=self._run.steps, lossy=self._run.lossy, periods=periods)
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
        engine, feed = self.chooser.engine, self.chooser.feed
        return LocalUpdates(plan=self.plan, engine=engine, feed=feed, channel=self._pump.channel, tell=self.tell)

    @property
    def _follows_islands(self) -> bool:
        """Return whether sharded states follow the islands, if any; sharded parameters do only if asked to."""
        sharding = self.methods.sharding
        return sharding.is_sharded and (sharding.needs_islands or not sharding.takes_parameters)

    def _islands(self, hosts: int) -> tuple[tuple[int, ...], ...]:
        """Return the islands that the links suggest, else the hosts of many ranks, else one per rank."""
        everyone = self._pump.channel.levels.everyone
        if hosts > 1:
            if (links := self._links.find(self._pump.channel)).has_islands:
                return links.islands
            if len(everyone) > PAIRS and self._links.hosts:  # so many ranks apart would average little
                return self._links.hosts
        return tuple((rank,) for rank in everyone)

    def replan(self, step: int, compute_s: float, exposed_s: float) -> Replan | None:
        """Return a better exchange between two steps if links have drifted or steps differ from their forecast.

        None for no change. `compute_s`, `exposed_s`: what the step that has ended computed, and waited for messages.
        All ranks must call it after the same step.
        """
        if not self._watch.active or step >= self._run.steps:
            return None
        self._steps.note(compute_s, exposed_s)
        if not self._watch.due(step):
            return None
        is_first = self._watch.first is None
        drifted = self._watch.drifted(self._watch.window(self._pump))
        times, by_rank = self._steps.window(self._pump)
        is_off = self._all_say(self._steps.is_off(times))
        if self._tells_machines and (unequal := self.chooser.unequal.later(by_rank, self.plan)):
            self.tell(f"machines: {unequal}", step)
        if self._can_rehearse:
            if (links := self._changed_links(drifted, is_first)) is not None:
                return self._chosen_anew(links, step, "the links have drifted")
            if self._looks_again:
                return self._chosen_anew(self._links.find(self._pump.channel), step, "gradients are looked at again")
        elif drifted or self._changed_links(drifted, is_first) is not None:
            why = "with sharded parameters, gradients are looked at before training alone, in a run that chooses then"
            self.tell(f"the links have drifted; the exchange stays: {why}", step)
            self._watch.begin_anew(self._pump)
            return None
        return self._recalibrated(step, times) if is_off else None

    def _chosen_anew(self, links: Network, step: int, why: str) -> Replan | None:
        """Choose for these links between two steps, and return the change if it is worth one."""
        before, in_force = self.plan, self._decision
        self._choose(links, step)
        self._watch.begin_anew(self._pump)
        changed = self._replaced(before, step, why, in_force)
        self._expect()
        return changed

    @property
    def _looks_again(self) -> bool:
        """Return whether a choice is due because gradients were not finite before the first step; a few times."""
        is_blind = self._run.lossy and self.chooser.basis is not None and not self.chooser.knows
        if not is_blind or self._looks == _LOOKS:
            return False
        self._looks += 1
        return True

    @property
    def _tells_machines(self) -> bool:
        """Return whether the host's clock says what a step computes, alone."""
        return self.chooser.engine.device.type == "cpu" and not self.methods.sharding.takes_parameters

    def _changed_links(self, drifted: bool, is_first: bool) -> Network | None:
        """Return the links as they are now, if they have changed since the choice.

        `drifted`: whether windows of steps say so; `is_first`: whether the window that has ended is the first since the
        choice, with which the next ones are compared.
        """
        if drifted:
            return self._links.find(self._pump.channel)
        if not is_first:
            return None
        changed = self._links.look_again(self._pump.channel, self.plan.islands)
        self._watch.skip(self._pump)  # exclude the probe's messages
        return changed

    @property
    def _can_rehearse(self) -> bool:
        """Return whether what a choice is based on is known, or can be measured between two steps.

        A step of sharded parameters cannot: between steps a rank holds a part of them.
        """
        return self.chooser.knows or not self.methods.sharding.takes_parameters

    def _recalibrated(self, step: int, times: StepTimes) -> Replan | None:
        """Correct the measurements by what steps took, and return what is then worth a change."""
        assert self._decision is not None and self.chooser.basis is not None and self._steps.expected is not None
        said = f"steps {times.show()}, expected: {self._steps.expected.show()}"
        best, before = self._decision.best, self.plan
        found = Calibration.fit(best.facts, best.picked, times)
        self.chooser.basis = self.chooser.basis.corrected(found)
        decision, now = self.chooser.basis.fastest(), best.on(found.applied(best.facts))
        self.plan = self.chooser.settle_on(self.plan, decision)
        said, in_force = f"{said} ({found.show()})", replace(decision, best=now)
        is_same = decision.written == before.exchange and decision.buckets == before.buckets
        if self._all_say(not is_same and decision.replaces(now)):
            if (changed := self._replaced(before, step, said, in_force)) is not None:
                # If it was the links, all windows since were of other links than the plan says.
                self._links.choose_for(self.plan.links, may_change=True)
                self._watch.begin_anew(self._pump)
                self._expect()
                return changed
        else:
            self.plan = before  # with the forecast that its exchange was chosen by
            self.tell(f"{said}; the exchange stays", step)
        self.chooser.decision = in_force
        self._steps.begin_anew(self._pump, times)
        return None

    def _expect(self) -> None:
        """Expect steps as the decision forecasts them, where its buckets are sent and nothing else is waited for.

        Nothing is expected of a device that computes beside the host, whose clock does not say what a step computes.
        """
        plan, decision = self.plan, self._decision
        is_comparable = self.chooser.is_comparable(self.plan) and self.methods.sync.is_plain and not plan.adapted_from
        if not is_comparable or decision is None or plan.buckets != decision.buckets:
            self._steps.begin_anew(self._pump, None)
        else:
            self._steps.begin_anew(self._pump, StepTimes.forecast(decision.best.facts, decision.best.picked))

    def _replaced(self, before: Plan, step: int, why: str, in_force: Decision | None) -> Replan | None:
        """Return the change from the plan `before` to the exchange just chosen; None where that is the same.

        What stays keeps its buckets, adaptations and error feedback, and has its own forecast: that of the decision
        `in_force`, by the measurements as they are now. Where they have none of it, its forecast is the one from before
        and steps are not compared with it: what they would show is of other links than the measurements.
        """
        decision, chosen, cut = self._decision, self.plan.exchange, {name: getattr(self.plan, name) for name in _CUT}
        kept = {name: getattr(before, name) for name in ("exchange", "adapted_from", *_CUT)}
        assert decision is not None and self.chooser.basis is not None
        again = self._again(decision, in_force, before)
        # An exchange may also be cut anew: not one that was adapted, nor where what is in force is not known.
        is_cut_anew = again is not None and not before.adapted_from
        is_other = is_cut_anew or chosen not in (before.exchange, before.adapted_from)
        if self._all_say(is_other and (again is None or decision.replaces(again.best))):
            if self._all_chose(chosen, cut):
                self.plan = self.plan.model_copy(update=kept)
                said = f"{why}; exchange: {self.plan.reasons['exchange']}"
                changed = self.change(chosen, step, said, adapted_from="", cut=cut)
                if changed is not None:
                    return changed
            else:
                why += "; ranks would choose unlike exchanges, as their sums are rounded unlike"
        # The islands that the links have shown stay known: the channel has their process groups.
        found = {"islands": self.plan.islands, "links": self.plan.links}
        self.plan, self.chooser.decision = before.model_copy(update=found), None
        if again is not None and before.adapted_from:
            self.chooser.decision = again  # of what was adapted, for what its parameters wait for
        elif again is not None and self._fed_back(again.written, {}) == before.exchange:
            self.plan = self.chooser.settle_on(self.plan, again)
            if again.written != before.exchange:
                self._adopt("exchange", before.exchange, self.plan.reasons["exchange"] + _FED_BACK)
            self.plan = self.plan.model_copy(update=kept)
        said = f"the exchange stays: {self.plan.reasons.get('exchange', told(before.exchange))}"
        if self._decision is None:
            said += "; what its steps take on the links as they are is not known"
        self.plan = self.chooser.repriced(self.plan)
        self.keep(self.plan)
        self.tell(f"{why}; {said}", step)
        return None

    def _again(self, decision: Decision, in_force: Decision | None, before: Plan) -> Decision | None:
        """Return what is in force by the measurements that `decision` was made from; None if they have none of it.

        `in_force`: as it was chosen; None: by an earlier start, which has left its plan `before` alone. All ranks know
        it or none does, as those that know what is in force compare steps with its forecast.
        """
        assert self.chooser.basis is not None
        if in_force is not None:
            again = self.chooser.basis.again(decision, in_force)
        else:
            is_same = (decision.written, decision.buckets) == (before.exchange, before.buckets)
            again = decision if is_same else None
        return again if self._all_say(again is not None) else None

    def _all_say(self, is_so: bool) -> bool:
        """Return whether all ranks find so; they do alike, but versions of Python may round a sum of floats unlike."""
        return bool(gathered(self._pump.channel, [float(is_so)]).min() > 0)

    def _all_chose(self, chosen: Exchanges, cut: Mapping[str, object]) -> bool:
        """Return whether all ranks have chosen the same; what they do not agree about is not begun."""
        text = json.dumps([chosen, {name: cut[name] for name in sorted(cut)}], sort_keys=True).encode()
        mine = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")  # exact in float64
        return len(set(gathered(self._pump.channel, [mine])[:, 0].tolist())) == 1

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
            reason = self.plan.reasons.get("exchange", told(asked)).removesuffix(_FED_BACK)
            self._adopt("exchange", written, reason + _FED_BACK)
        self.plan = self.chooser.repriced(self.plan)
        self._watch.forget()
        self._watch.skip(self._pump)  # exclude messages of the exchange before
        self._steps.expected = None  # of another exchange nothing is forecast
        self.keep(self.plan)
        self.tell(said, step)
        plan = self.plan
        return Replan(self.methods.exchange.by_name(self.chooser.params), plan.bucket_bytes, plan.buckets, plan.turns)

    def _fed_back(self, written: Exchanges, cut: Mapping[str, object]) -> Exchanges:
        """Return `written`, in buckets as in `cut`, with error feedback where the plan's exchange keeps a residual."""
        methods = self.methods
        read = methods.under(exchange=written, **cut)
        return with_owed(written, read, self.chooser.params, owing_under(methods, self.chooser.params))

    def links(self) -> Network:
        """Return the links as they are now. The probe takes some seconds, between two steps."""
        links = self._links.find(self._pump.channel, ways=True)
        self._watch.skip(self._pump)  # exclude the probe's messages
        return links

    def _learn(self, links: Network, step: int = 0) -> None:
        """Take the islands that the links show, if the plan has none; tell of those that it contradicts, once."""
        shown, kept = links.islands, self.plan.islands
        if links.has_islands and not kept:
            self.plan = self.plan.model_copy(update={"islands": shown})
            self._pump.channel.widen(ProcessGroups.islands(shown))
        elif self._links.contradicts(links, kept):
            self.tell(f"the links show the islands {_listed(shown)}; the plan keeps {_listed(kept)}", step)

    def _choose(self, links: Network, step: int = 0) -> None:
        """Choose the exchange and update the plan. `step`: the batch to profile, if no gradients are known yet."""
        self._learn(links, step)
        self.plan = self.chooser.choose(self.plan, links, step)
        # Right after a choice in mid-run links may change again, and where steps are not compared none shows it.
        self._links.choose_for(self.plan.links, may_change=step > 0 or not self.chooser.is_comparable(self.plan))

    @property
    def _unlinked(self) -> str:
        """Return a note on islands that are given, though one machine has no links between them to choose by."""
        if not self.plan.islands:
            return ""
        given = _listed(self.plan.islands)
        return f"; machines.islands {given} share it, so no link between them was measured: name plan.sync to part them"


def _listed(islands: tuple[tuple[int, ...], ...]) -> str:
    return str([list(island) for island in islands])
