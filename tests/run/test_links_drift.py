"""`plan.exchange: auto` on links that change: chosen before the first step, looked at again as the run goes on. The
wire, the links and the gradients are made for it; everything else is what a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.autotune import (
    bandwidth_monitor,
    choice_basis,
    exchange_chooser,
    exchange_profile,
    exchange_selection,
    link_use,
    measured_links,
    rehearsal,
    same_arithmetic,
    step_monitor,
    step_remainder,
)
from gossamer.autotune.bandwidth_monitor import BandwidthMonitor, BandwidthWindow
from gossamer.autotune.exchange_chooser import ExchangeChooser, SelectionSettings
from gossamer.autotune.exchange_selection import ExchangeSelector
from gossamer.autotune.step_monitor import StepMonitor
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.comm_thread import order_of_turns
from gossamer.comm.message import ProcessGroups
from gossamer.plan import price_of
from gossamer.plan.exchange import CANDIDATES, Calibration, Decision, MessagePrice, StepTimes, across_islands
from gossamer.recipe import ParameterRules, PlanMethods
from gossamer.run.profile_step import StepProfile
from gossamer.run.trainer_services import Replan
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig
from gossamer.spec.network import Link, Network
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.sync import buckets_of

MIB = 1 << 20
SLOW, FAST = Link(latency_s=1e-3, bytes_per_s=2e6), Link(latency_s=1e-4, bytes_per_s=1e9)
FLAT_FAST = Network(islands=((0, 1, 2, 3),), levels={"all": FAST})
FLAT_SLOW = Network(islands=((0, 1, 2, 3),), levels={"all": SLOW})
SLOW_AS_READ = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=2e-3, bytes_per_s=1.4e6)})  # noise


def islands(*groups: tuple[int, ...]) -> Network:
    return Network(islands=groups, levels={"all": SLOW, "island": FAST, "between": SLOW})


PAIRS, OTHERS = islands((0, 1), (2, 3)), islands((0, 2), (1, 3))


@dataclass
class World:
    """One rank of four, whose peers do as it does. `links` are what each probe finds, `gradients` what each batch
    gives; `encoding_s` is what encoding a bucket takes.
    """

    links: Iterator[Network]
    gradients: Callable[[int], dict[str, Tensor]]
    params: dict[str, Tensor]
    told: list[str] = field(default_factory=list)
    kept: list[Plan] = field(default_factory=list)
    rehearsed: list[int] = field(default_factory=list)
    timed: list[str] = field(default_factory=list)
    encoding_s: float = 1e-3

    def rehearse(self, engine: object, feed: object, params: dict[str, Tensor], step: int = 0) -> StepProfile:
        self.rehearsed.append(step)
        ready = {name: 0.2 * (i + 1) / len(params) for i, name in enumerate(reversed(params))}
        return StepProfile(0.3, 0.2, ready, self.gradients(step))

    def turn_seconds_of(self, exchange: object, *where: object) -> tuple[float, ...]:
        self.timed.append(type(exchange).__name__)
        return (self.encoding_s,)


@dataclass(frozen=True)
class Named(Decision):
    """A decision for an exchange of this name."""

    name: Any = ""
    is_worth: bool = True

    @property
    def written(self) -> Any:
        return self.name

    def replaces(self, now: Any) -> bool:
        return self.is_worth


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ExchangeSelector, World]]:
    def make(
        found: Sequence[Network], *, lossy: bool = True, bad: Sequence[int] = (), size: int = 520, **plan: Any
    ) -> tuple[ExchangeSelector, World]:
        module = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(4)])
        params = dict(module.named_parameters())
        torch.manual_seed(0)
        sound = {name: torch.randn_like(p) for name, p in params.items()}
        sick = {name: g.clone() for name, g in sound.items()}
        sick["1.weight"][3, 4] = torch.inf
        here = World(iter(found), lambda step: sick if step in bad else sound, params)
        monkeypatch.setattr(measured_links, "probe", lambda channel, **_: next(here.links))
        monkeypatch.setattr(exchange_chooser, "message_price", lambda *_: MessagePrice())
        monkeypatch.setattr(rehearsal, "profile_step", here.rehearse)
        monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.5)
        monkeypatch.setattr(exchange_profile, "time", SimpleNamespace(perf_counter=float, thread_time=float))
        monkeypatch.setattr(exchange_methods, "turn_seconds_of", here.turn_seconds_of)
        chooser = ExchangeChooser(
            engine=SimpleNamespace(module=module, device=torch.device("cpu")),  # type: ignore[arg-type]
            feed=None,  # type: ignore[arg-type]
            pump=SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(4)), busy_s=1.0, encoded_s=0.0),  # type: ignore[arg-type]
            run=SelectionSettings(lossy=lossy, steps=10_000),
            tell=lambda message, step: here.told.append(message),
        )
        return ExchangeSelector(chooser=chooser, plan=Plan(**{**PLAN, **plan}), keep=here.kept.append), here

    return make


PLAN: dict[str, Any] = {
    "mesh": MeshSizes(replica=4),
    "batch_fractions": (1.0,) * 4,
    "rows": (1,) * 4,
    "microbatches": (1,) * 4,
    "exchange": "auto",
}


def look(
    exchanger: ExchangeSelector, step: int, rate: float, *, share: float = 0.05, step_s: float = 1.0, sure: bool = True
) -> Replan | None:
    """One look at the links, where the messages of the last 20 steps passed at this rate, waited for in this share.

    `sure`: links are taken to be as the last choice found them; else they are measured again after its first window.
    """
    exchanger._links._is_unsure = exchanger._links._is_unsure and not sure
    watch, pump, waited_s = exchanger._watch, exchanger.chooser.pump, 20 * step_s * share
    watch.sent_bytes, watch.busy_s = pump.channel.meter.total_bytes - int(rate * waited_s), pump.busy_s - waited_s
    watch.steps_s, watch._ended_s = [step_s] * 20, 0.0
    as_expected = exchanger._steps.expected
    return exchanger.replan(step, *((as_expected.compute_s, as_expected.exposed_s) if as_expected else (1.0, 0.0)))


def drift(exchanger: ExchangeSelector, step: int, rate: float) -> Replan | None:
    """Two looks running, at `step` and before it, at links whose messages pass at this rate."""
    every = exchanger._watch.every
    assert look(exchanger, step - every, rate) is None
    return look(exchanger, step, rate)


MEASURE = BandwidthWindow(sent_bytes=1.0, waited_s=1.0, step_s=1.0, steps=20)  # links much slower than any here


@pytest.mark.parametrize("lossy", [True, False])
@pytest.mark.parametrize(
    "found",
    [
        [FLAT_FAST, PAIRS, FLAT_FAST, FLAT_SLOW, PAIRS],
        [PAIRS, FLAT_SLOW, OTHERS, PAIRS, FLAT_FAST],
        [FLAT_SLOW, OTHERS, PAIRS, FLAT_SLOW, OTHERS],
    ],
    ids=["appear", "disappear", "change"],
)
def test_links_drift_and_islands_come_and_go(world, found: list[Network], lossy: bool) -> None:
    """Every plan can run on the wire there is, in buckets as large as it says; prices are of what was priced."""
    exchanger, here = world(found, lossy=lossy)
    plans = [exchanger.settle(automatic=True, hosts=2)]
    for _ in range(1, len(found)):
        before = exchanger.plan
        watch = exchanger._watch
        assert look(exchanger, watch.every, rate=5.0) is None and watch.first is not None, "a window is the measure"
        changed = drift(exchanger, 3 * watch.every, rate=1e9)
        plans.append(exchanger.plan)
        assert here.told[-1].startswith("the links have drifted") and here.kept[-1] == exchanger.plan
        if changed is None:
            assert (exchanger.plan.exchange, exchanger.plan.buckets) == (before.exchange, before.buckets)
        else:
            assert (changed.buckets, changed.turns) == (exchanger.plan.buckets, exchanger.plan.turns)
        assert exchanger._watch.first is None, "the window after a look is the new measure"
        rules = ParameterRules.read(exchanger.plan.exchange).by_name(here.params)
        cut = buckets_of(here.params, rules, bucket_bytes=MIB, named=exchanger.plan.buckets)
        assert [tuple(e.name for e in layout.entries) for layout, _ in cut] == list(exchanger.plan.buckets)
        levels = exchanger.chooser.pump.channel.levels
        for layout, one in cut:
            one.check(layout, levels)
        rounds = [len(one.traffic(layout, levels, 0)) for layout, one in cut]
        assert order_of_turns(rounds, exchanger.plan.turns) is not None, "an order for other exchanges"
        if not lossy:
            assert all(one.traits.lossless or not one.traits.remembers for one in rules.values())
    assert here.rehearsed == [0], "gradients are looked at once"
    assert any(plan.exchange != plans[0].exchange for plan in plans), "nothing has changed: this proves nothing"


@pytest.mark.parametrize(
    ("later", "changes"),
    [(FLAT_FAST, True), (PAIRS, True), (FLAT_SLOW, False), (SLOW_AS_READ, False)],
    ids=["heal", "islands", "stay", "noise"],
)
def test_links_that_heal_right_after_a_choice_are_found(world, later: Network, changes: bool) -> None:
    """In the first window after it, which all later ones are compared with: none of those would show it."""
    exchanger, here = world([FLAT_FAST, FLAT_SLOW, later])
    exchanger.settle(automatic=True, hosts=2)
    look(exchanger, 20, rate=5.0)
    assert drift(exchanger, 60, rate=1.0) is not None
    slow, watch = exchanger.plan.exchange, exchanger._watch
    assert watch.first is None and watch.every == 40
    changed = look(exchanger, 80, rate=3.0, sure=False)
    assert next(here.links, None) is None, "links are measured once more"
    assert (changed is not None) is changes
    if changes:
        assert here.told[-1].startswith("the links have drifted; exchange: ") and exchanger.plan.exchange != slow
        assert watch.first is None and watch.every == 80, "the next window is the measure, after a longer interval"
    else:
        assert exchanger.plan.exchange == slow and watch.first is not None
        assert watch.sent_bytes == exchanger.chooser.pump.channel.meter.total_bytes, "the probe's messages do not count"
        assert look(exchanger, 120, rate=3.0, sure=False) is None, "and no more after that"


def test_a_rank_that_is_slow_or_becomes_so_is_named(world, monkeypatch) -> None:
    """Before training as it is profiled, and later once two looks say so; on a GPU, host clocks do not say it."""
    slow, monitored = [1.0, 1.0, 1.0, 1.0], step_monitor.gathered

    def gathered(channel: Any, row: Any) -> Tensor:
        return monitored(channel, row) * torch.tensor([slow], dtype=torch.float64).T

    exchanger, here = world([FLAT_SLOW])
    monkeypatch.setattr(exchange_chooser, "gathered", lambda *_: torch.tensor([[1.0], [9.0], [1.0], [1.0]]))
    exchanger.settle(automatic=True, hosts=2)
    assert sum(line.startswith("machines: rank 1 computes 9 s") for line in here.told) == 1
    exchanger, here = world([FLAT_SLOW])
    monkeypatch.setattr(exchange_chooser, "gathered", monitored)
    monkeypatch.setattr(step_monitor, "gathered", gathered)
    exchanger.settle(automatic=True, hosts=2)
    compute_s, exposed_s, encode_s = expected(exchanger)
    usual, said = (compute_s, exposed_s, encode_s), "machines: rank 2 computes "
    assert not any(line.startswith("machines: ") for line in here.told)
    slow[2] = 3.0
    walk(exchanger, [usual])
    assert not any(line.startswith("machines: ") for line in here.told)
    walk(exchanger, [usual, usual, usual])
    assert sum(line.startswith(said) for line in here.told) == 1
    slow[2], slow[3] = 1.0, 3.0
    exchanger.chooser.engine.device = torch.device("meta")  # any that is not the host
    walk(exchanger, [usual, usual, usual])
    assert not any(line.startswith("machines: rank 3") for line in here.told)


def test_islands_stay_known_where_the_exchange_stays(world) -> None:
    """The channel has their process groups: what is chosen among later is between them."""
    near = Network(islands=PAIRS.islands, levels=dict.fromkeys(("all", "island", "between"), FAST))
    exchanger, here = world([FLAT_FAST, near])
    before = exchanger.settle(automatic=True, hosts=2)
    look(exchanger, exchanger._watch.every, rate=5.0)
    assert drift(exchanger, 3 * exchanger._watch.every, rate=1e9) is None
    assert exchanger.plan.exchange == before.exchange == "dense"
    assert exchanger.plan.islands == here.kept[-1].islands == PAIRS.islands
    assert exchanger.chooser.pump.channel.levels.groups["island"] == PAIRS.islands


def test_windows_are_compared_with_one_of_several_steps(world) -> None:
    """A run that is resumed shortly before a look has seen a step or two, and not how links usually are."""
    exchanger, _ = world([FLAT_SLOW])
    exchanger.settle(automatic=True, hosts=2)
    watch = exchanger._watch
    looks = [step for step in range(18, 62) if watch.due(step)]
    assert looks == [40, 60] and len(watch.steps_s) == 43, "of three steps alone no window is made"
    watch.first, watch.steps_s = MEASURE, []
    assert watch.due(80)


def test_what_another_exchange_has_sent_is_not_counted(world) -> None:
    exchanger, _ = world([FLAT_SLOW])
    exchanger.settle(automatic=True, hosts=2)
    watch, meter = exchanger._watch, exchanger.chooser.pump.channel.meter
    watch.sent_bytes, watch.steps_s = meter.total_bytes - 1000, [1.0] * 15
    assert exchanger.change("star", 7, "adapted", adapted_from="") is not None
    assert watch.sent_bytes == meter.total_bytes and not watch.steps_s


def test_prices_are_of_their_own_candidate(world) -> None:
    """On islands the third column is bf16 between islands, and not what was third where all ranks were one."""
    exchanger, here = world([FLAT_FAST])
    exchanger.settle(automatic=True, hosts=2)
    assert exchanger.chooser.basis is not None
    measured = exchanger.chooser.basis.profile
    flat = measured.facts(FLAT_SLOW, CANDIDATES, MIB)[0]
    exchanger.chooser.pump.channel.widen(ProcessGroups.islands([(0, 1), (2, 3)]))
    wide = measured.facts(PAIRS, across_islands(CANDIDATES), MIB)[0]
    for one, other in zip(flat.buckets, wide.buckets, strict=True):
        losses = [None if o is None else o.loss for o in one.options]
        assert [None if o is None else o.loss for o in other.options] == [0.0, *losses]
    count = len(here.timed)
    measured.facts(islands((0, 1), (2, 3)), across_islands(CANDIDATES), MIB)
    assert len(here.timed) == count, "what is known is not measured again"
    measured.facts(PAIRS, across_islands(CANDIDATES), 2 * MIB)
    assert len(here.timed) == count, "that of other sizes is interpolated"
    exchanger.chooser.pump.channel.widen(ProcessGroups.islands([(0, 2), (1, 3)]))
    measured.facts(OTHERS, across_islands(CANDIDATES), MIB)
    assert len(here.timed) > count, "other groups have prices of their own"


def test_islands_that_the_links_contradict_are_told_once(world) -> None:
    exchanger, here = world([OTHERS, OTHERS, PAIRS, OTHERS], islands=((0, 1), (2, 3)))
    exchanger.chooser.pump.channel.widen(ProcessGroups.islands([(0, 1), (2, 3)]))
    exchanger.settle(automatic=True, hosts=2)
    for _ in range(3):
        assert look(exchanger, exchanger._watch.every, rate=5.0) is None
        drift(exchanger, 3 * exchanger._watch.every, rate=1e9)
    assert next(here.links, None) is None, "the links were looked at four times"
    told = [one for one in here.told if one.startswith("the links show")]
    assert told == ["the links show the islands [[0, 2], [1, 3]]; the plan keeps [[0, 1], [2, 3]]"]


def test_sizes_of_buckets_are_tried_from_small_ones_to_all_gradients() -> None:
    wide = {"w": torch.empty(100 * MIB // 4, device="meta")}
    assert link_use.sizes_of_buckets(wide, 1 << 30) == (*(MIB, 4 * MIB, 16 * MIB, 25 * MIB, 50 * MIB, 100 * MIB),)
    assert link_use.sizes_of_buckets(wide, 8 * MIB) == (MIB, 4 * MIB, 8 * MIB), "none is larger than is allowed"
    assert link_use.sizes_of_buckets({"w": torch.empty(10)}, 1 << 30) == (10, 20, 40)
    huge = {"w": torch.empty(1 << 36, device="meta")}
    assert link_use.sizes_of_buckets(huge, 1 << 28) == (1 << 28,), "thousands of buckets help nobody"
    assert link_use.sizes_of_buckets({}, MIB) == (1,)


def test_other_messages_pass_at_another_rate(world) -> None:
    """So after a change, whoever asked for it, the next window is the measure."""
    exchanger, here = world([FLAT_FAST])
    exchanger.settle(automatic=True, hosts=2)
    exchanger._watch.first = MEASURE
    assert exchanger.change(exchanger.plan.exchange, 3, "adapted", adapted_from="") is None
    assert exchanger._watch.first == MEASURE
    changed = exchanger.change({"topk": {"fraction": 0.1}}, 4, "adapted", adapted_from="dense")
    assert changed is not None and exchanger._watch.first is None
    assert changed.buckets == exchanger.plan.buckets != () and here.kept == [exchanger.plan]


def test_what_goes_on_keeps_its_buckets_and_what_begins_has_those_it_was_timed_with(world, monkeypatch) -> None:
    far = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1.0, bytes_per_s=1e12)})
    exchanger, here = world([FLAT_SLOW, far, far, FLAT_SLOW])
    int8, int4 = (
        MethodConfig("error_feedback", {"inner": {"two_shot": {"codec": c}}}).written() for c in ("int8", "int4")
    )
    chosen, made = iter([int8, int8, int4, "dense"]), list[Decision]()
    real = choice_basis.choose

    def decide(*given: Any, **more: Any) -> Decision:
        found = real(*given, **more)
        is_worth = len(made) != 1  # the second one is not
        named = Named(found.best, found.dense, found.candidates, found.also, name=next(chosen), is_worth=is_worth)
        made.append(named)
        return made[-1]

    monkeypatch.setattr(choice_basis, "choose", decide)
    plans = [exchanger.settle(automatic=True, hosts=2)]
    for turn in range(3):
        exchanger._watch.first = MEASURE
        changed = drift(exchanger, exchanger._watch.every * 2, rate=1e9)
        plans.append(exchanger.plan)
        assert (changed is None) == (turn == 0) and here.kept[-1] == exchanger.plan
        assert changed is None or (changed.buckets, changed.turns) == (exchanger.plan.buckets, exchanger.plan.turns)
    assert [p.buckets for p in plans] == [made[0].buckets, made[0].buckets, made[2].buckets, made[3].buckets]
    assert [p.turns for p in plans] == [made[0].turns, made[0].turns, made[2].turns, made[3].turns]
    assert made[2].buckets != made[0].buckets, "the same buckets on other links: this proves nothing"
    assert plans[1].forecast.wire_bytes == plans[0].forecast.wire_bytes


@dataclass
class Trials:
    """Trial steps in which encoding takes so many times what was timed, as other work has the processors.

    `slower`: before the first trial and after each, how much longer all work takes then; in a trial the mean of both.
    """

    exchanger: ExchangeSelector
    encode: float
    slower: Sequence[float] = (1.0,) * 5
    batches: list[int] = field(default_factory=list)
    tried: list[Any] = field(default_factory=list)

    def alone_s(self, step: int) -> float:
        return 0.6 * self.slower[len(self.tried)]

    def times(self, plan: Plan, step: int) -> StepTimes:
        slower = fmean(self.slower[len(self.tried) :][:2] or [1.0])
        self.batches.append(step)
        self.tried.append(plan.exchange)
        basis = self.exchanger.chooser.basis
        assert basis is not None
        largest = self.exchanger.chooser.largest_bytes(plan)
        cuts = basis.profile.facts(basis.links, CANDIDATES, largest, divides=True)
        cut = next(one for one in cuts if tuple(b.names for b in one.buckets) == plan.buckets)
        methods = PlanMethods.of(plan).exchange
        picked = [
            next(c for c, one in enumerate(CANDIDATES) if ParameterRules.single(one.written) == methods.of(name))
            for name in (bucket.names[0] for bucket in cut.buckets)
        ]
        return StepTimes.forecast(Calibration(slower, slower * self.encode).applied(cut), picked)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_a_forecast_is_of_the_whole_step(world, sharding: str) -> None:
    """Ranks agree on it in the hops of a gather after its gradients, and what others have updated is waited for."""
    exchanger, here = world([FLAT_SLOW], sharding=sharding)
    told = exchanger.settle(automatic=True, hosts=2).forecast
    assert told.update_s == 0.0
    assert told.step_s == pytest.approx(told.compute_s + told.exposed_s + told.update_s)
    rows_s = sum(p.nbytes for p in here.params.values()) * 3 / 4 / SLOW.bytes_per_s if sharding == "zero1" else 0.0
    alone_s = exchanger.chooser.decision.forecast.exposed_s
    assert told.exposed_s - alone_s == pytest.approx(rows_s + 2 * SLOW.hop_s, rel=0.05) and alone_s > 0


@pytest.mark.parametrize("encode", [1.0, 30.0])
def test_a_choice_is_tried_before_training(world, encode: float) -> None:
    """Where steps take what was forecast, it stays; else the measurements are corrected and another one is tried."""
    untried = world([FLAT_SLOW])[0].settle(automatic=True, hosts=2)
    exchanger, here = world([FLAT_SLOW], bad=[0])
    trials = Trials(exchanger, encode)
    exchanger.chooser.run = replace(exchanger.chooser.run, trials=trials)  # type: ignore[arg-type]
    plan = exchanger.settle(automatic=True, hosts=2)
    assert set(trials.batches) == {1}, "the first batch with finite gradients"
    assert trials.tried[0] == untried.exchange and here.told[-1].endswith(plan.reasons["exchange"])
    if encode == 1.0:
        assert (plan.exchange, plan.buckets) == (untried.exchange, untried.buckets)
        assert plan.forecast.step_s == pytest.approx(untried.forecast.step_s)
        return
    tried, took_s = len(trials.tried), trials.times(plan, 1).step_s
    assert 1 < tried <= 4 and plan.exchange != untried.exchange
    assert plan.forecast.step_s == pytest.approx(took_s, rel=0.05)
    assert exchanger._steps.expected is not None and exchanger._steps.expected.step_s == pytest.approx(took_s, rel=0.05)


def test_on_a_machine_whose_speed_varies_a_choice_is_as_good_as_on_a_steady_one(world) -> None:
    """Its steps are as short on a steady machine, whichever trial found the machine fastest."""
    step_s = list[float]()
    for speeds in ((1.0,) * 5, (1.0, 1.0, 1.6, 1.6, 1.0), (0.7, 0.7, 1.3, 1.0, 1.0)):
        exchanger, _ = world([FLAT_SLOW])
        trials = Trials(exchanger, 30.0, slower=speeds)
        exchanger.chooser.run = replace(exchanger.chooser.run, trials=trials)  # type: ignore[arg-type]
        plan = exchanger.settle(automatic=True, hosts=2)
        assert len(trials.tried) > 1, "nothing to compare: this proves nothing"
        step_s.append(Trials(exchanger, 30.0).times(plan, 1).step_s)
    assert max(step_s[1:]) <= 1.02 * step_s[0]


@pytest.mark.parametrize(
    ("rate", "between_s", "steps", "are_tried"),
    [
        (1.75e4, (5, 7), 3, True),
        (4.4e3, (20, 29), 3, False),
        (4.4e3, (20, 29), 1000, True),
        (1e3, (99, 999), 1000, False),
    ],
)
def test_no_more_time_is_spent_on_trials_than_they_are_worth(
    world, rate: float, between_s: tuple[float, float], steps: int, are_tried: bool
) -> None:
    """30 s, or a twentieth of a run where that is longer, but never more than two minutes."""
    slow = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1e-3, bytes_per_s=rate)})
    exchanger, _ = world([slow])
    trials = Trials(exchanger, 1.0)
    exchanger.chooser.run = replace(exchanger.chooser.run, trials=trials, steps=steps)  # type: ignore[arg-type]
    step_s = exchanger.settle(automatic=True, hosts=2).forecast.step_s
    assert between_s[0] < step_s < between_s[1] and bool(trials.tried) == are_tried


def test_what_lossy_exchanges_would_save_is_told_after_trials_too(world) -> None:
    """By the measurements as steps have corrected them."""
    exchanger, _ = world([FLAT_SLOW], lossy=False)
    untried = exchanger.settle(automatic=True, hosts=2).reasons["exchange"]
    tried, _ = world([FLAT_SLOW], lossy=False)
    tried.chooser.run = replace(tried.chooser.run, trials=Trials(tried, 30.0))  # type: ignore[arg-type]
    said = tried.settle(automatic=True, hosts=2).reasons["exchange"]
    assert "plan.lossy: true would take" in untried and "plan.lossy: true would take" in said
    assert untried.partition("plan.lossy")[2] != said.partition("plan.lossy")[2]


def test_the_memory_that_a_sharding_has_counted_bounds_its_buckets(world) -> None:
    int8 = {"error_feedback": {"inner": {"two_shot": {"codec": "int8"}}}}
    resumed, _ = world([FLAT_FAST], exchange=int8, bucket_bytes=MIB)
    sharded, _ = world([FLAT_FAST], exchange=int8, bucket_bytes=4 * MIB, sharding="zero1")
    largest = [one.chooser.largest_bytes(one.plan) for one in (resumed, sharded)]
    assert largest == [link_use.LARGEST_BUCKET_BYTES, 4 * MIB]


@pytest.mark.parametrize("lossy", [True, False])
def test_one_bad_batch_is_no_bad_run(world, lossy: bool) -> None:
    """The next batch is rehearsed in its place; the choice is what it would have been."""
    bad, here = world([FLAT_SLOW], lossy=lossy, bad=[0, 1])
    good, _ = world([FLAT_SLOW], lossy=lossy)
    assert good.settle(automatic=True, hosts=2).exchange != "dense"
    bad, here = world([FLAT_SLOW], lossy=lossy, bad=[0, 1])
    assert bad.settle(automatic=True, hosts=2).exchange == good.plan.exchange
    assert here.rehearsed == [0, 1, 2] and "not finite" not in here.told[0]


@pytest.mark.parametrize("lossy", [True, False])
def test_where_no_batch_will_do_the_wire_decides_and_it_is_said(world, lossy: bool) -> None:
    """Among what is exact, or bf16; and losses are looked for again when the links have drifted."""
    exchanger, here = world([FLAT_SLOW, FLAT_FAST], lossy=lossy, bad=[0, 1, 2])
    plan = exchanger.settle(automatic=True, hosts=2)
    assert "bfloat16" in str(plan.exchange) and "error_feedback" not in str(plan.exchange)
    assert "not finite on ranks [0, 1, 2, 3]" in plan.reasons["exchange"] and "not finite" in here.told[0]
    assert "plan.lossy: true" not in plan.reasons["exchange"], "of which nothing is known"
    exchanger._watch.first = MEASURE
    if lossy:  # is looked at again without a drift
        look(exchanger, 20, rate=1e9)
    else:
        drift(exchanger, 40, rate=1e9)
    looked = [0, 1, 2, 20 if lossy else 40]
    assert here.rehearsed == looked and "not finite" not in exchanger.plan.reasons["exchange"]


def test_what_steps_have_shown_of_one_profile_is_not_applied_to_another(world) -> None:
    """A step that is measured anew takes what it takes: three times as long as it was thought to take at first."""
    exchanger, here = world([FLAT_SLOW, FLAT_SLOW, FLAT_SLOW], bad=[0, 1, 2])
    exchanger.settle(automatic=True, hosts=2)
    exchanger.chooser.basis = exchanger.chooser.basis.corrected(Calibration(compute=3.0))
    look(exchanger, 20, rate=5.0)
    assert here.rehearsed == [0, 1, 2, 20]
    assert exchanger.chooser.basis.facts[0].compute_s == pytest.approx(0.3)
    exchanger.chooser.basis = exchanger.chooser.basis.corrected(Calibration(compute=3.0))
    exchanger._watch.first = MEASURE
    drift(exchanger, 120, rate=1e9)
    assert here.rehearsed == [0, 1, 2, 20], "its profile stays, and so does what steps have shown of it"
    assert exchanger.chooser.basis.facts[0].compute_s == pytest.approx(0.9)


def test_a_number_that_is_none_is_refused_by_name_and_rank(world) -> None:
    exchanger, here = world([FLAT_SLOW])
    here.encoding_s = float("nan")
    with pytest.raises(BadInput, match=r"finite cpu_s of all-reduce for \d+ numbers, got nan on rank 0"):
        exchanger.settle(automatic=True, hosts=2)


def test_a_drift_is_a_factor_of_two_either_way(world) -> None:
    """Of the window right after the choice; what passed before that was no training."""
    exchanger, here = world([FLAT_FAST] * 3)
    exchanger.settle(automatic=True, hosts=2)
    for step, rate in ((20, 1e9), (40, 1.9e9), (60, 1.9e9), (80, 0.6e9), (100, 0.6e9)):
        assert look(exchanger, step, rate) is None
    assert exchanger._watch.first is not None and len(here.told) == 1, "neither is a drift"
    drift(exchanger, 140, 0.4e9)
    assert len(here.told) == 2 and exchanger._watch.every == 40, "slower counts; looks get rarer"
    look(exchanger, 170, 1e9)
    assert exchanger._watch.first is None, "not asked in between"
    look(exchanger, 200, 1e9)
    drift(exchanger, 280, 2.1e9)
    assert len(here.told) == 3, "so does faster, than in the first window after that look"


def test_one_window_is_no_drift(world) -> None:
    """Two running show it, and both the same."""
    exchanger, here = world([FLAT_FAST] * 2)
    exchanger.settle(automatic=True, hosts=2)
    for step, rate in ((20, 1e9), (40, 9e9), (60, 1e9), (80, 0.1e9), (100, 1e9), (120, 9e9), (140, 0.1e9)):
        look(exchanger, step, rate)
    assert len(here.told) == 1
    look(exchanger, 160, 0.1e9)
    assert len(here.told) == 2
    for step in (200, 240):
        look(exchanger, step, 1e9)
    assert len(here.told) == 2, "and what a look has shown before a probe says nothing after it"


def test_where_nothing_waits_nothing_has_drifted(world) -> None:
    """Of messages that hide, the waiting is noise. Where it becomes a share of the step, it counts."""
    exchanger, here = world([FLAT_FAST] * 2)
    exchanger.settle(automatic=True, hosts=2)
    for step, rate in ((20, 1e9), (40, 9e9), (60, 9e9), (80, 0.1e9), (100, 0.1e9)):
        look(exchanger, step, rate, share=0.049)
    assert len(here.told) == 1
    look(exchanger, 120, 0.1e9, share=0.05)
    look(exchanger, 140, 0.1e9, share=0.05)
    assert len(here.told) == 2


@pytest.mark.parametrize(("rate", "step_s"), [(9e9, 1.06), (0.1e9, 0.94)])
def test_a_computation_that_changes_is_no_drift(world, rate: float, step_s: float) -> None:
    """A longer backward hides more, which looks like faster links; but those make no step longer."""
    exchanger, here = world([FLAT_FAST] * 2)
    exchanger.settle(automatic=True, hosts=2)
    look(exchanger, 20, 1e9, share=0.2)
    for step in (40, 60, 80):
        look(exchanger, step, rate, share=0.05, step_s=step_s)
    assert len(here.told) == 1
    for step in (100, 120):
        look(exchanger, step, rate, share=0.05, step_s=1.0)
    assert len(here.told) == 2


def test_the_rank_that_waits_least_says_what_passed_and_one_long_step_is_not_the_window(monkeypatch) -> None:
    watch = BandwidthMonitor(active=True, first=MEASURE)
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(3)), busy_s=4.0)
    now = iter([0.0, 1.0, 2.0, 32.0, 33.0, 34.0])
    monkeypatch.setattr(bandwidth_monitor.time, "perf_counter", lambda: next(now) + 100.0)
    assert [step for step in range(15, 21) if watch.due(step)] == [20]
    rows = [[100.0, 4.0, 1.0, 5.0], [90.0, 1.0, 1.0, 5.0], [60.0, 6.0, 1.0, 5.0]]
    seen = list[list[float]]()
    monkeypatch.setattr(bandwidth_monitor, "gathered", lambda _, row: seen.append(row) or torch.tensor(rows))
    assert watch.window(pump) == BandwidthWindow(90.0, 1.0, 1.0, 5.0) and seen == [[0, 4.0, 1.0, 5]]
    assert watch.steps_s == [] and watch.busy_s == 4.0


def test_a_rank_that_reads_its_rows_late_is_no_slow_link(monkeypatch) -> None:
    """Rank 1 waits for rank 0, which begins its steps half a second later, and computes a millisecond less."""
    pump: Any = SimpleNamespace(channel=None, encoded_s=0.0)
    rows = torch.tensor([[0.300, 0.05, 0.0], [0.301, 0.55, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(step_monitor, "gathered", lambda *_: rows)
    watch = StepMonitor(expected=StepTimes(0.301, 0.05, 0.0))
    assert [watch.is_off(watch.window(pump)[0]) for _ in range(2)] == [False, False]
    rows[0, 1] = 0.15  # the links are slower: whoever waits least waits longer
    assert [watch.is_off(watch.window(pump)[0]) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(("waited_s", "has_drifted"), [((12.0, 2.1), False), ((12.0, 12.0), True)])
def test_a_rank_that_computes_longer_is_no_drift(monkeypatch, waited_s: tuple[float, float], has_drifted: bool) -> None:
    """The other one waits for it; on links that are slower both wait."""
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(2)), busy_s=0.0)
    windows = iter([(2.0, 2.0), waited_s, waited_s])
    watch, steps_s = BandwidthMonitor(active=True), iter([1.0, 1.6, 1.6])

    def gathered(channel: object, row: object) -> Tensor:
        length_s = next(steps_s)
        return torch.tensor([[1e8, one, length_s, 20.0] for one in next(windows)])

    monkeypatch.setattr(bandwidth_monitor, "gathered", gathered)
    assert [watch.drifted(watch.window(pump)) for _ in range(3)] == [False, False, has_drifted]


def test_what_a_probe_sends_is_no_training() -> None:
    watch = BandwidthMonitor(active=True, first=MEASURE, steps_s=[9.0])
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(3)), busy_s=4.0)
    pump.channel.meter.links["0>1"] = 700
    watch.begin_anew(pump)
    assert (watch.sent_bytes, watch.busy_s, watch.steps_s, watch.first, watch.every) == (700, 4.0, [], None, 40)


def test_every_probe_is_told_the_hosts(world, monkeypatch) -> None:
    """Every probe of a run is told the ranks of each host, where the launcher knows them."""
    asked = list[Any]()
    exchanger, _ = world([FLAT_FAST] * 3)
    real = measured_links.probe
    monkeypatch.setattr(measured_links, "probe", lambda channel, **how: (asked.append(how), real(channel))[1])
    monkeypatch.setattr(exchange_selection, "hosts_of", lambda channel, host: ((0, 1), (2, 3)))
    exchanger.settle(automatic=True, hosts=2, host=0)
    exchanger._watch.first = MEASURE
    drift(exchanger, 40, rate=1e9)
    exchanger.links()
    assert [one["hosts"] for one in asked] == [((0, 1), (2, 3))] * 3 and [one["ways"] for one in asked][2]


def test_one_machine_with_given_islands_is_told_what_was_not_measured(world) -> None:
    exchanger, _ = world([], sync="auto", islands=((0, 1), (2, 3)))
    plan = exchanger.settle(automatic=True, hosts=1)
    assert plan.sync == "every_step" and plan.reasons["sync"] == (
        "every step: every process is on this machine; machines.islands [[0, 1], [2, 3]] share it, so no link between "
        "them was measured: name plan.sync to part them"
    )
    alone, _ = world([], sync="auto")
    assert alone.settle(automatic=True, hosts=1).reasons["sync"] == "every step: every process is on this machine"


def test_an_auto_that_laws_have_settled_is_told_with_the_choice(world) -> None:
    exchanger, here = world([FLAT_SLOW], sync="every_step", reasons={"sync": "every step: they say so"})
    exchanger.settle(automatic=True, hosts=2)
    assert here.told[-1] == "sync: every step: they say so"


@pytest.mark.parametrize(
    ("ranks", "apart"), [(4, ((0,), (1,), (2,), (3,))), (20, ((0, 1, 2, 3, 4), tuple(range(5, 20))))]
)
def test_local_updates_without_islands_are_by_rank_or_among_many_by_host(world, monkeypatch, ranks, apart) -> None:
    exchanger, _ = world([Network(islands=(tuple(range(ranks)),), levels={"all": FAST})])
    exchanger.chooser.pump.channel = LoopbackChannel(0, ProcessGroups.flat(ranks))
    exchanger._links.hosts = ((0, 1, 2, 3, 4), tuple(range(5, 20)))
    assert exchanger._islands(2) == apart


def walk(exchanger: ExchangeSelector, windows: Sequence[tuple[float, float, float]]) -> list[Replan | None]:
    """Windows of 20 steps whose steps compute, wait, and encode for so long; what each look says."""
    said = list[Replan | None]()
    for turn, (compute_s, exposed_s, encode_s) in enumerate(windows):
        every, pump = exchanger._watch.every, exchanger.chooser.pump
        for step in range(1, every + 1):
            pump.encoded_s += encode_s
            exchanger._watch.steps_s, exchanger._watch._ended_s = [compute_s + exposed_s] * 20, 0.0
            changed = exchanger.replan(turn * every + step, compute_s, exposed_s)
            assert changed is None or step == every, "between two looks"
        said.append(changed)
    return said


def expected(exchanger: ExchangeSelector) -> tuple[float, float, float]:
    times = exchanger._steps.expected
    assert times is not None
    return times.compute_s, times.exposed_s, times.encode_s


def test_a_thousand_steady_steps_change_nothing(world) -> None:
    """Steps as forecast but for noise, and steps that are steadily not: the second is said once, and corrected."""
    exchanger, here = world([FLAT_SLOW])
    exchanger.settle(automatic=True, hosts=2)
    before, (compute_s, exposed_s, encode_s) = exchanger.plan, expected(exchanger)
    noise = [0.97, 1.03, 1.0, 0.98, 1.05] * 10
    assert not any(walk(exchanger, [(compute_s * n, exposed_s * n, encode_s) for n in noise]))
    assert len(here.told) == 1 and here.rehearsed == [0]
    longer = [(1.15 * compute_s * n, 1.15 * exposed_s * n, encode_s) for n in noise]
    walk(exchanger, longer)
    assert len(here.told) == 2 and "steps compute " in here.told[1] and "expected: compute " in here.told[1]
    assert exchanger.chooser.decision is not None
    assert exchanger.chooser.decision.best.step_s == pytest.approx(1.15 * (compute_s + exposed_s), rel=0.08)
    assert exchanger.plan == before and here.kept == [], "nor is the forecast that was made"


def test_steps_that_wait_get_a_harsher_exchange_and_slack_a_milder_one(world) -> None:
    usual = Link(latency_s=1e-4, bytes_per_s=3e8)  # bytes take long enough to matter
    exchanger, here = world(2 * [FLAT_FAST.model_copy(update={"levels": {"all": usual}})])
    exchanger.settle(automatic=True, hosts=2)
    before = exchanger.plan
    compute_s, exposed_s, encode_s = expected(exchanger)
    slow = (compute_s, exposed_s + 0.2, encode_s)  # more than late messages explain
    first, changed = walk(exchanger, [slow, slow])
    assert first is None and changed is not None, "two windows running"
    assert exchanger.plan.exchange != before.exchange and here.kept[-1] == exchanger.plan
    assert "messages x" in here.told[-1] and "; exchange: " in here.told[-1]
    assert (changed.buckets, changed.turns) == (exchanger.plan.buckets, exchanger.plan.turns)
    harsh = exchanger.chooser.decision
    assert harsh is not None and harsh.best.lost > 0 and exchanger._watch.every == 40
    compute_s, exposed_s, encode_s = expected(exchanger)
    hidden = (4 * compute_s, 0.0, encode_s)  # another processor has slowed down: all that is sent has time
    assert walk(exchanger, [hidden, hidden])[-1] is not None
    assert exchanger.chooser.decision is not None and exchanger.chooser.decision.best.lost < harsh.best.lost / 2


def test_links_are_looked_at_once_more_after_steps_have_shown_them_to_be_others(world) -> None:
    """What steps show of messages is not what the plan says of its links, which a resumed run compares."""
    usual = Link(latency_s=1e-4, bytes_per_s=3e8)
    measured = FLAT_FAST.model_copy(update={"levels": {"all": usual}})
    exchanger, here = world([measured, FLAT_SLOW])
    exchanger.settle(automatic=True, hosts=2)
    compute_s, exposed_s, encode_s = expected(exchanger)
    slow = (compute_s, exposed_s + 0.2, encode_s)
    assert walk(exchanger, [slow, slow])[-1] is not None and exchanger.plan.links == measured.levels
    look(exchanger, 80, rate=5.0, sure=False)
    assert "the links have drifted; " in here.told[-1] and exchanger.plan.links == FLAT_SLOW.levels


def test_one_window_that_is_off_is_no_reason(world) -> None:
    exchanger, here = world([FLAT_FAST])
    exchanger.settle(automatic=True, hosts=2)
    compute_s, exposed_s, encode_s = expected(exchanger)
    usual, slow = (compute_s, exposed_s, encode_s), (compute_s, exposed_s + compute_s, encode_s)
    hurried = (compute_s / 2, exposed_s, encode_s)
    assert not any(walk(exchanger, [slow, usual, slow, hurried, usual, hurried, slow]))
    assert len(here.told) == 1


@pytest.mark.parametrize("given", [{"sharding": "zero1"}, {"adapted_from": "dense"}])
def test_where_steps_wait_for_more_than_the_exchange_nothing_is_put_down_to_it(world, given: dict[str, Any]) -> None:
    exchanger, _ = world([FLAT_SLOW, FLAT_SLOW], **given)
    exchanger.settle(automatic=True, hosts=2)
    assert exchanger._steps.expected is None
    assert not any(walk(exchanger, [(9.0, 9.0, 9.0)] * 4))


def test_what_stays_after_a_drift_has_its_own_forecast_and_goes_on_being_compared(world, monkeypatch) -> None:
    """Its buckets are not those of the choice that was made anew; the log says what is in force."""
    far = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1.0, bytes_per_s=1e12)})
    exchanger, here = world([FLAT_SLOW, far])
    int8 = MethodConfig("error_feedback", {"inner": {"two_shot": {"codec": "int8"}}}).written()
    real = choice_basis.choose

    def decide(*given: Any, **more: Any) -> Decision:
        found = real(*given, **more)
        return Named(found.best, found.dense, found.candidates, found.also, name=int8, is_worth=False)

    monkeypatch.setattr(choice_basis, "choose", decide)
    before, made = exchanger.settle(automatic=True, hosts=2), exchanger.chooser.decision
    exchanger._watch.first = MEASURE
    assert drift(exchanger, 40, rate=1e9) is None and made is not None
    now, basis = exchanger.chooser.decision, exchanger.chooser.basis
    assert now is not None and basis is not None
    assert now.buckets == exchanger.plan.buckets == before.buckets != basis.fastest().buckets
    assert now.best.picked == made.best.picked and exchanger.plan.turns == before.turns
    assert exchanger.plan.forecast.exposed_s > 1.0 > before.forecast.exposed_s
    assert "the links have drifted; the exchange stays: " in here.told[-1]
    assert "takes 2 s more than all-reduce with 6 s exposed (links: " in here.told[-1]
    assert exchanger._steps.expected is not None and exchanger._steps.expected.exposed_s > 1.0


def test_what_stays_in_error_feedback_is_timed_on_the_links_as_they_are(world) -> None:
    """Decisions write bf16, and the plan bf16 in feedback for a parameter that is owed something."""
    quicker = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1e-3, bytes_per_s=8e6)})
    exchanger, here = world([FLAT_SLOW, quicker], lossy=False)
    before = exchanger.settle(automatic=True, hosts=2, owed=frozenset({"0.weight"}))
    assert "error_feedback" in str(before.exchange) and "bfloat16" in str(before.exchange)
    exchanger._watch.first = MEASURE
    assert drift(exchanger, 40, rate=1e9) is None
    plan, decision, basis = exchanger.plan, exchanger.chooser.decision, exchanger.chooser.basis
    assert decision is not None and decision.best.facts in basis.facts
    assert (plan.exchange, plan.buckets, plan.turns) == (before.exchange, before.buckets, before.turns)
    assert plan.forecast.exposed_s < 0.5 * before.forecast.exposed_s
    assert plan.reasons["exchange"].endswith("in error feedback, which sends what was owed before")
    assert plan.reasons["exchange"] != before.reasons["exchange"] and here.kept[-1] == plan
    assert exchanger._steps.expected == StepTimes.forecast(decision.best.facts, decision.best.picked)


def test_what_stays_among_islands_is_timed_on_the_links_as_they_are(world) -> None:
    """The candidates between islands have other numbers; all-reduce is among them."""
    near = Network(islands=PAIRS.islands, levels=dict.fromkeys(("all", "island", "between"), FAST))
    exchanger, _ = world([FLAT_FAST, near])
    exchanger.settle(automatic=True, hosts=2)
    exchanger._watch.first = MEASURE
    assert drift(exchanger, 40, rate=1e9) is None
    decision, basis = exchanger.chooser.decision, exchanger.chooser.basis
    assert decision is not None and decision.written == exchanger.plan.exchange == "dense"
    assert decision.best.facts in basis.facts and decision.candidates == basis.candidates
    assert exchanger._steps.expected is not None


def test_what_stays_and_is_not_known_is_compared_with_nothing_and_said(world, monkeypatch) -> None:
    """Its forecast is of the links before: steps would be corrected by what the links have shown already."""
    exchanger, here = world([FLAT_SLOW, FLAT_SLOW, FLAT_SLOW])
    exchanger.settle(automatic=True, hosts=2)
    monkeypatch.setattr(choice_basis.ChoiceBasis, "again", lambda *_: None)
    exchanger._watch.first = MEASURE
    assert drift(exchanger, 40, rate=1e9) is None
    assert exchanger.chooser.decision is None and exchanger._steps.expected is None and exchanger.waited() == {}
    assert here.told[-1].endswith("; what its steps take on the links as they are is not known")
    walk(exchanger, [(9.0, 9.0, 9.0)] * 4)
    assert exchanger.chooser.decision is None


def test_what_was_adapted_is_waited_for_as_the_links_are(world) -> None:
    """Policies ask what each parameter waits for: of the exchange that was adapted, on the new links."""
    alike = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1e-3, bytes_per_s=2.1e6)})
    exchanger, here = world([FLAT_SLOW, alike])
    exchanger.settle(automatic=True, hosts=2)
    base = exchanger.plan.exchange
    assert exchanger.change("star", 7, "adapted", adapted_from=base) is not None
    before = exchanger.plan
    exchanger._watch.first = MEASURE
    assert drift(exchanger, 40, rate=1e9) is None
    decision, basis = exchanger.chooser.decision, exchanger.chooser.basis
    assert decision is not None and decision.best.facts in basis.facts and decision.written == base
    stays = before.model_copy(update={"links": alike.levels})
    assert (exchanger.plan, exchanger._steps.expected) == (stays, None) and here.kept[-1] == stays


def test_islands_that_appear_do_not_change_what_sharded_states_send(world) -> None:
    """Rows are dealt before the first step, among all ranks: what is priced later is what the run sends."""
    exchanger, here = world([FLAT_FAST, PAIRS], sharding="zero1")
    exchanger.settle(automatic=True, hosts=2)
    exchanger._watch.first = MEASURE
    drift(exchanger, 40, rate=1e9)
    methods, levels = exchanger.methods, exchanger.chooser.pump.channel.levels
    assert exchanger.plan.islands == PAIRS.islands and methods.sharding.deal(levels).path != ("all",)
    one = ParameterRules.single("dense")
    assert exchanger.chooser.basis.profile.as_sent(one) == methods.sharding.exchange(one, ("all",))
    shapes = tuple((name, tuple(p.shape)) for name, p in here.params.items())
    dealt = methods.sharding.deal(ProcessGroups.flat(4))
    cost = price_of(methods, shapes, levels, deal=dealt)
    assert exchanger.plan.forecast.wire_bytes == cost.wire_bytes != price_of(methods, shapes, levels).wire_bytes
    rows_s = sum(p.nbytes for p in here.params.values()) * 3 / 4 / SLOW.bytes_per_s
    decision = exchanger.chooser.decision
    assert decision is not None
    assert exchanger.plan.forecast.exposed_s - decision.forecast.exposed_s > rows_s, "all rows cross the links"


def test_islands_of_the_start_are_those_that_states_are_dealt_among(world) -> None:
    exchanger, _ = world([PAIRS], sharding="zero1")
    exchanger.settle(automatic=True, hosts=2)
    assert exchanger.chooser.dealt == exchanger.methods.sharding.deal(exchanger.chooser.pump.channel.levels)
    assert exchanger.chooser.dealt is not None and exchanger.chooser.dealt.path == ("island", "between")


def test_a_resumed_run_with_sharded_parameters_keeps_its_exchange_when_links_drift(world) -> None:
    """Its parameters are in parts then: a step cannot be rehearsed. It is said, and nothing is probed."""
    exchanger, here = world([], exchange="dense", sharding="zero3")
    exchanger.settle(automatic=True, hosts=2)
    exchanger._watch.first = MEASURE
    before = exchanger.plan
    assert drift(exchanger, 40, rate=1e9) is None
    assert exchanger.plan == before and here.rehearsed == []
    assert "the links have drifted; the exchange stays: with sharded parameters" in here.told[-1]
    assert exchanger._watch.every == 40


def test_a_resumed_run_with_sharded_parameters_says_that_its_links_were_others(world) -> None:
    exchanger, here = world([FLAT_SLOW], exchange="dense", sharding="zero3", links={"all": FAST})
    exchanger.settle(automatic=True, hosts=2)
    assert look(exchanger, 20, rate=5.0, sure=False) is None and not here.rehearsed
    assert "the links have drifted; the exchange stays: with sharded parameters" in here.told[-1]


def test_what_is_chosen_after_trials_is_timed_by_the_steps_of_the_trial_that_was_best(world) -> None:
    """The second one computed less and waited long, so the first one stays, and nothing of the second."""
    exchanger, _ = world([FLAT_SLOW])
    made = list[Any]()

    def times(plan: Plan, step: int) -> StepTimes:
        assert exchanger.chooser.decision is not None
        best = exchanger.chooser.decision.best
        found = StepTimes.forecast(best.facts, best.picked)
        made.append(plan.exchange)
        if len(made) == 1:
            return replace(found, exposed_s=found.exposed_s + 0.3)
        return StepTimes(0.5 * found.compute_s, found.exposed_s + 1.0, found.encode_s)

    trials: Any = SimpleNamespace(times=times, alone_s=lambda step: 1.0)
    exchanger.chooser.run = replace(exchanger.chooser.run, trials=trials)
    exchanger.settle(automatic=True, hosts=2)
    assert len(made) > 1, "no second trial: this proves nothing"
    decision, basis = exchanger.chooser.decision, exchanger.chooser.basis
    assert decision is not None and basis is not None and exchanger.plan.exchange == made[0]
    assert decision.best.facts in basis.facts


def test_step_times_are_kept_only_where_they_are_looked_at(world) -> None:
    exchanger, _ = world([], exchange="dense")
    exchanger.settle(automatic=False, hosts=1)
    for step in range(1, 200):
        assert exchanger.replan(step, 1.0, 0.1) is None
    assert exchanger._steps._steps == []


def test_a_round_apart_waits_for_links_as_steps_have_shown_them(world, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial in which messages took longer is of the same links as the rounds it is compared with."""
    seen = list[Any]()
    real = exchange_selection.choose_period

    def choose_period(decision: Decision, facts: Any, **more: Any) -> Any:
        seen.append(facts)
        return real(decision, facts, **more)

    monkeypatch.setattr(exchange_selection, "choose_period", choose_period)
    for late in (1.0, 4.0):
        exchanger, _ = world([FLAT_SLOW], sync="auto")

        def times(plan: Plan, step: int, one: ExchangeSelector = exchanger, factor: float = late) -> StepTimes:
            assert one.chooser.decision is not None
            best = one.chooser.decision.best
            return StepTimes.forecast(Calibration(messages=factor).applied(best.facts), best.picked)

        trials: Any = SimpleNamespace(times=times, alone_s=lambda step: 1.0)
        exchanger.chooser.run = replace(exchanger.chooser.run, trials=trials)
        exchanger.settle(automatic=True, hosts=2)
    assert sum(seen[1].fragments_s) > 2 * sum(seen[0].fragments_s)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_a_resumed_run_whose_links_have_changed_meanwhile_finds_out(world, sharding: str) -> None:
    """After its first window, once: its plan says which links its exchange was chosen for."""
    fast: Any = {"exchange": "dense", "links": {"all": FAST}, "sharding": sharding}
    at_start = [FLAT_FAST] if sharding == "zero1" else []  # islands are looked for
    exchanger, here = world([*at_start, FLAT_FAST], **fast)
    exchanger.settle(automatic=True, hosts=2)
    assert look(exchanger, 20, rate=5.0, sure=False) is None and next(here.links, None) is None
    assert not here.told and not here.rehearsed, "they are as they were"
    exchanger, here = world([*at_start, FLAT_SLOW], **fast)
    exchanger.settle(automatic=True, hosts=2)
    changed = look(exchanger, 20, rate=5.0, sure=False)
    assert changed is not None and here.rehearsed == [20] and exchanger.plan.exchange != "dense"
    assert here.told[-1].startswith("the links have drifted; exchange: ")
    assert exchanger.plan.links == FLAT_SLOW.levels and here.kept[-1] == exchanger.plan


def test_a_run_that_began_on_one_machine_chooses_where_it_is_resumed_on_several(world) -> None:
    """torchrun and the like say how many there are at each start, and the plan is the same for both."""
    begun, here = world([])
    plan = begun.settle(automatic=True, hosts=1)
    assert plan.exchange == "dense" and plan.links and not here.rehearsed
    exchanger, here = world([FLAT_SLOW])
    exchanger.plan = Plan.model_validate_json(plan.model_dump_json())
    exchanger.settle(automatic=True, hosts=2)
    assert look(exchanger, 20, rate=5.0, sure=False) is not None
    assert here.told[-1].startswith("the links have drifted; exchange: ")


def test_a_resumed_run_whose_plan_does_not_say_its_links_measures_none(world) -> None:
    exchanger, here = world([], exchange="dense")
    exchanger.settle(automatic=True, hosts=2)
    assert look(exchanger, 20, rate=5.0, sure=False) is None and not here.told


def test_links_are_not_looked_at_after_the_last_step(world) -> None:
    exchanger, _ = world([], exchange="dense", links={"all": FAST})
    exchanger.settle(automatic=True, hosts=2)
    exchanger.chooser.run = replace(exchanger.chooser.run, steps=20)
    assert look(exchanger, 20, rate=5.0, sure=False) is None


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_links_that_change_right_after_the_start_are_found_where_no_step_is_compared(world, sharding: str) -> None:
    exchanger, here = world([FLAT_FAST, FLAT_SLOW], sharding=sharding)
    exchanger.settle(automatic=True, hosts=2)
    changed = look(exchanger, 20, rate=5.0, sure=False)
    assert (changed is not None) is (sharding == "zero1"), "elsewhere the forecast of its steps would show it"
    assert (next(here.links, None) is None) is (sharding == "zero1")


@pytest.mark.parametrize("is_worth", [True, False])
def test_another_exchange_is_taken_where_that_is_worth_a_change(world, monkeypatch, is_worth: bool) -> None:
    int8, int4 = (
        MethodConfig("error_feedback", {"inner": {"two_shot": {"codec": c}}}).written() for c in ("int8", "int4")
    )
    names, real = iter([int8, int4]), choice_basis.choose

    def decide(*given: Any, **more: Any) -> Decision:
        found = real(*given, **more)
        return Named(found.best, found.dense, found.candidates, found.also, name=next(names), is_worth=is_worth)

    monkeypatch.setattr(choice_basis, "choose", decide)
    exchanger, here = world([FLAT_SLOW, FLAT_SLOW])
    assert exchanger.settle(automatic=True, hosts=2).exchange == int8
    exchanger._watch.first = MEASURE
    assert (drift(exchanger, 40, rate=1e9) is not None) is is_worth
    assert exchanger.plan.exchange == (int4 if is_worth else int8)
    assert ("the exchange stays: " in here.told[-1]) is not is_worth


def test_the_same_exchange_is_cut_anew_where_that_is_worth_it(world) -> None:
    """One bucket where each costs a second, several where they overlap."""
    far = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1.0, bytes_per_s=1e9)})
    near = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1e-4, bytes_per_s=1.5e8)})
    exchanger, _ = world([far, near], lossy=False)
    before = exchanger.settle(automatic=True, hosts=2)
    exchanger._watch.first = MEASURE
    changed = drift(exchanger, 40, rate=1e9)
    assert changed is not None and len(changed.buckets) > len(before.buckets) == 1
    assert (changed.buckets, changed.turns) == (exchanger.plan.buckets, exchanger.plan.turns)


def test_gradients_that_were_not_finite_at_first_are_looked_at_again_a_few_times(world) -> None:
    for bad, looked, lossy in (([0, 1, 2], [0, 1, 2, 20], True), (range(1000), [0, 1, 2, 20, 21, 22], False)):
        exchanger, here = world([FLAT_SLOW] * 9, bad=bad)
        exchanger.settle(automatic=True, hosts=2)
        look(exchanger, 20, rate=5.0)
        assert here.rehearsed == looked and ("error_feedback" in str(exchanger.plan.exchange)) is lossy
        assert any("gradients are looked at again" in line for line in here.told)
        for step in range(40, 2000, 20):
            look(exchanger, step, rate=5.0)
        assert len(here.rehearsed) == (4 if lossy else 3 + 3 * 3)


def test_a_parameter_that_is_frozen_in_mid_run_stays_in_its_bucket(world) -> None:
    exchanger, here = world([FLAT_SLOW, FLAT_FAST])
    exchanger.settle(automatic=True, hosts=2)
    here.params["1.weight"].requires_grad_(False)
    exchanger._watch.first = MEASURE
    changed = drift(exchanger, 40, rate=1e9)
    assert changed is not None and changed.exchange.keys() >= here.params.keys()


def test_what_ranks_do_not_agree_about_is_not_begun(world, monkeypatch) -> None:
    exchanger, here = world([FLAT_SLOW, FLAT_FAST])
    before, real = exchanger.settle(automatic=True, hosts=2), exchange_selection.gathered

    def gathered(channel: Any, row: Any) -> Tensor:
        found = real(channel, row)
        found[1] += row[0] > 1  # of a digest, another one
        return found

    monkeypatch.setattr(exchange_selection, "gathered", gathered)
    exchanger._watch.first = MEASURE
    assert drift(exchanger, 40, rate=1e9) is None and exchanger.plan.exchange == before.exchange
    said = "; ranks would choose unlike exchanges, as their sums are rounded unlike; the exchange stays: "
    assert said in here.told[-1]


def test_ranks_that_compute_unlike_bits_get_no_low_rank_exchange(world, monkeypatch) -> None:
    """Every rank computes their mean by matrix products of its own."""
    exchanger, _ = world([FLAT_SLOW])
    plan = exchanger.settle(automatic=True, hosts=2)
    assert "_sgd" in str(plan.exchange) or "powersgd" in str(plan.exchange), "none anyway: this proves nothing"
    assert "unlike bits" not in plan.reasons["exchange"]
    real = same_arithmetic.gathered
    monkeypatch.setattr(same_arithmetic, "gathered", lambda *given: real(*given) + torch.arange(4.0)[:, None])
    exchanger, _ = world([FLAT_SLOW])
    plan = exchanger.settle(automatic=True, hosts=2)
    assert "sgd" not in str(plan.exchange) and "int" in str(plan.exchange)
    assert "ranks compute unlike bits, on which low-rank exchanges would part" in plan.reasons["exchange"]


def test_an_interval_that_was_doubled_is_halved_in_steady_windows(monkeypatch) -> None:
    watch = BandwidthMonitor(active=True)
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(2)), busy_s=0.0)
    steady, fast = (BandwidthWindow(rate, 10.0, 1.0, 20) for rate in (1e8, 9e8))
    watch.begin_anew(pump)
    watch.begin_anew(pump)
    assert watch.every == 80 and not watch.drifted(steady)
    found = list[int]()
    for window in [steady] * 3 + [fast] + [steady] * 12:
        assert not watch.drifted(window)
        found.append(watch.every)
    assert found == [80] * 7 + [40] * 4 + [20] * 5, "one window that differs begins the count anew"


def test_a_round_apart_is_compared_with_a_whole_step(world, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both update their parameters, and in a step all ranks agree about it, which a round does not wait for."""
    seen, real = list[Any](), exchange_selection.choose_period

    def choose_period(decision: Decision, facts: Any, **more: Any) -> Any:
        seen.append((decision.forecast, facts, more["now"]))
        return real(decision, facts, **more)

    monkeypatch.setattr(exchange_selection, "choose_period", choose_period)
    monkeypatch.setattr(step_remainder, "update_seconds", lambda *_: 0.25)
    for optimizer in (None, SimpleNamespace()):
        exchanger, _ = world([FLAT_SLOW], sync="auto")
        exchanger.chooser.run = replace(exchanger.chooser.run, optimizer=optimizer)  # type: ignore[arg-type]
        exchanger.settle(automatic=True, hosts=2)
    (alone, plain, _), (_, updated, now) = seen
    assert updated.step_s == pytest.approx(plain.step_s + 0.25)
    assert now.exposed_s - alone.exposed_s == pytest.approx(2 * SLOW.hop_s, rel=1e-6)
    assert now.step_s == pytest.approx(now.compute_s + now.exposed_s + 0.25)


def test_float64_gradients_are_rounded_by_permission_alone(world) -> None:
    """bf16 has eight bits: near enough to float32, and not to these."""
    for dtype, is_rounded in ((torch.float32, True), (torch.float64, False)):
        exchanger, _ = world([FLAT_SLOW], lossy=False)
        exchanger.chooser.engine.module.to(dtype)
        plan = exchanger.settle(automatic=True, hosts=2)
        assert ("bfloat16" in str(plan.exchange)) is is_rounded


def test_a_resumed_run_that_chooses_the_same_again_knows_what_its_steps_take(world) -> None:
    fresh, _ = world([FLAT_SLOW])
    plan = fresh.settle(automatic=True, hosts=2)
    kept = {name: getattr(plan, name) for name in ("exchange", "buckets", "turns", "bucket_bytes")}
    exchanger, here = world([FLAT_SLOW], links={"all": FAST}, **kept)
    exchanger.settle(automatic=True, hosts=2)
    assert look(exchanger, 20, rate=5.0, sure=False) is None and here.rehearsed == [20]
    assert here.told[-1].startswith("the links have drifted; the exchange stays: ")
    assert "is not known" not in here.told[-1] and exchanger.plan.links == FLAT_SLOW.levels
    assert exchanger.chooser.decision is not None and exchanger._steps.expected is not None and exchanger.waited()
