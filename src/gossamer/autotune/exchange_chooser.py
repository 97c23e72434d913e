"""Choose the exchange of each bucket among candidates that are measured with all ranks present.

All measurements are first combined over the ranks (the slowest counts), and the solver in `plan` is a pure function of
them. So all ranks make the same plan without a coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gossamer.autotune.choice_basis import ChoiceBasis
from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.link_use import LARGEST_BUCKET_BYTES, links_of_islands
from gossamer.autotune.message_price import message_price
from gossamer.autotune.rehearsal import Rehearsal, rehearse
from gossamer.autotune.same_arithmetic import computes_alike
from gossamer.autotune.step_remainder import StepRemainder
from gossamer.autotune.trial_steps import RIVAL, Trial, Trials, TrialSteps
from gossamer.autotune.unequal_ranks import UnequalRanks
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.exchange import Exchange
from gossamer.optimizer import Optimizer
from gossamer.plan import price_of
from gossamer.plan.exchange import CANDIDATES, Decision, MessagePrice, across_islands, alike_anywhere
from gossamer.policy import Policy
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.step_runner import ModelRuntime
from gossamer.sharding import RowPartition, UnshardOrder
from gossamer.spec.cost import Cost
from gossamer.spec.method_config import Exchanges
from gossamer.spec.network import Network
from gossamer.spec.plan import Plan


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
class ExchangeChooser:
    """What one rank knows of a run's steps and exchanges, and the decision made from it; plans go in and come out.

    All ranks must call the same methods between the same steps.
    """

    engine: ModelRuntime
    feed: Feed
    pump: CommThread
    run: SelectionSettings
    tell: Callable[[str, int], None]  # an event: message, step
    params: Mapping[str, Tensor] = field(init=False)  # those of the run: code may freeze some in mid-run
    basis: ChoiceBasis | None = None  # of the decision
    decision: Decision | None = None
    remainder: StepRemainder | None = None
    dealt: RowPartition | None = None  # the rows of each rank, once states are dealt
    unequal: UnequalRanks = field(default_factory=UnequalRanks)
    _price_of_messages: MessagePrice | None = None
    _is_alike: bool = True  # whether ranks compute the same bits from the same numbers

    def __post_init__(self) -> None:
        self.params = trainable(self.engine.module)

    def choose(self, plan: Plan, links: Network, step: int = 0) -> Plan:
        """Return the plan with the fastest exchanges on these links, its reason and estimate.

        `step`: the batch to profile, if no gradients are known yet.
        """
        profile, rehearsal = self._profiled(plan, step)
        candidates = CANDIDATES if self._is_alike else alike_anywhere(CANDIDATES)
        is_same = self.basis is not None and profile is self.basis.profile
        self.basis = ChoiceBasis.of(
            profile,
            rehearsal,
            links_of_islands(links, plan.islands),
            across_islands(candidates) if plan.islands else candidates,
            largest_bytes=self.largest_bytes(plan),
            price=self._priced(links),
            divides=not PlanMethods.of(plan).sharding.is_sharded and not plan.mesh.in_stages,
            lossy=self.run.lossy,
            is_alike=self._is_alike,
            before=self.basis if is_same else None,  # of a step that is measured anew, steps have shown nothing
        )
        return self.settle_on(plan, self.basis.fastest())

    def settle_on(self, plan: Plan, decision: Decision) -> Plan:
        """Return the plan with a decision, its reason and estimate."""
        assert self.basis is not None
        self.decision = decision
        plan = plan.model_copy(update={"buckets": decision.buckets, "turns": decision.turns})
        plan = self.basis.planned(plan, decision, self._cost(plan, decision.written))
        if self.remainder is None:
            return plan
        whole = self.remainder.added(plan.forecast, PlanMethods.of(plan), self.basis, self.pump.channel.levels)
        return plan.model_copy(update={"forecast": whole})

    def try_out(self, plan: Plan) -> Plan:
        """Time steps with the choice, correct the measurements by them, and choose again; return the best one tried."""
        assert self.decision is not None and self.basis is not None
        steps, trials, rehearsal = self.run.trials, Trials(self.run.steps), self.basis.rehearsal
        corrected = list[ChoiceBasis]()  # by each trial
        is_tried = self.is_comparable(plan) and trials.have_time_for(self.decision) and not rehearsal.sick
        if steps is None or not is_tried:
            return plan
        before_s = steps.alone_s(rehearsal.batch)
        while True:
            times, after_s = steps.times(plan, rehearsal.batch), steps.alone_s(rehearsal.batch)
            one, before_s = Trial.of(self.decision, times, (before_s + after_s) / 2), after_s
            trials = trials.and_then(one)
            self.tell(f"exchange: {one.show()}", 0)
            corrected.append(self.basis.corrected(one.slower))
            self.basis = corrected[-1].corrected(one.until(trials.alone_s))
            following = trials.following(self.basis.fastest(), self.basis.uniform(RIVAL))
            if following is None:
                best = trials.best
                usual = best.until(trials.alone_s)
                # What is chosen from later is to be timed by the same steps as the choice itself.
                basis = next(b for b, trial in zip(corrected, trials.made, strict=True) if trial is best)
                self.basis = basis.corrected(usual)
                return self.settle_on(plan, self.basis.told(best.decision.corrected(usual)))
            plan = self.settle_on(plan, following)

    def repriced(self, plan: Plan) -> Plan:
        """Return the plan with the estimated bytes of a step for the links as known now."""
        cost = self._cost(plan, plan.exchange)
        said = {"wire_bytes": cost.wire_bytes, "sent_bytes": cost.sent_bytes}
        return plan.model_copy(update={"forecast": plan.forecast.model_copy(update=said)})

    def deal(self, plan: Plan) -> RowPartition:
        """Return the rows of each rank: as the process groups suggest, until states are dealt."""
        return self.dealt or PlanMethods.of(plan).sharding.deal(self.pump.channel.levels)

    def largest_bytes(self, plan: Plan) -> int:
        """Return the most bytes of a bucket: with sharded states those of the plan, whose memory it has counted."""
        return plan.bucket_bytes if PlanMethods.of(plan).sharding.is_sharded else LARGEST_BUCKET_BYTES

    def is_comparable(self, plan: Plan) -> bool:
        """Return whether a step computes on the host and waits for nothing but the buckets of its gradients."""
        is_apart = plan.mesh.in_stages or PlanMethods.of(plan).sharding.is_sharded
        return not is_apart and self.engine.device.type == "cpu"

    @property
    def knows(self) -> bool:
        """Return whether gradients, and so what lossy exchanges lose, are known."""
        return self.basis is not None and self.basis.profile.knows

    def _cost(self, plan: Plan, written: Exchanges) -> Cost:
        shapes = tuple((name, tuple(p.shape)) for name, p in self.params.items())
        methods = PlanMethods.of(plan).under(exchange=written)
        return price_of(methods, shapes, self.pump.channel.levels, walk=self.run.walk, deal=self.deal(plan))

    def _priced(self, links: Network) -> MessagePrice:
        """Return the price of messages, measured once."""
        if self._price_of_messages is None:
            self._price_of_messages = message_price(self.pump, links, self.engine.device)
        return self._price_of_messages

    def _profiled(self, plan: Plan, step: int) -> tuple[ExchangeProfile, Rehearsal]:
        """Return the profile, measured once; compression errors are measured again while they are unknown."""
        if self.basis is not None and self.knows:
            return self.basis.profile, self.basis.rehearsal
        params, sharding, deal = trainable(self.engine.module), PlanMethods.of(plan).sharding, self.deal(plan)
        channel = self.pump.channel
        self.remainder = StepRemainder.measured(params, self.run.optimizer, sharding, deal, self.run.walk, channel)
        self._is_alike = computes_alike(channel, self.engine.device)
        timed, rehearsal = rehearse(self.engine, self.feed, channel, step)
        seconds = gathered(channel, [timed.compute_s])[:, 0].tolist()
        if unequal := self.unequal.at_start(seconds, plan):
            self.tell(f"machines: {unequal}", step)

        def as_sent(one: Exchange) -> Exchange:
            return sharding.exchange(one, self.deal(plan).path)

        found = ExchangeProfile.by(
            timed,
            params,
            CANDIDATES,
            self.pump,
            knows=not rehearsal.sick,
            as_sent=as_sent,
            look_ahead=plan.look_ahead if sharding.gives_back else None,
        )
        return found, rehearsal
