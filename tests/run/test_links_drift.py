"""`plan.exchange: auto` on links that change: chosen before the first step, looked at again as the run goes on. The
wire, the links and the gradients are made for it; everything else is what a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.autotune import exchange_profile, exchange_selection, link_use
from gossamer.autotune.exchange_selection import ExchangeSelector, SelectionSettings
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import ProcessGroups
from gossamer.plan.exchange import CANDIDATES, across_islands
from gossamer.recipe import ParameterRules
from gossamer.run.profile_step import StepProfile
from gossamer.run.trainer_services import Replan
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig
from gossamer.spec.network import Link, Network
from gossamer.spec.plan import BUCKET_BYTES, MeshSizes, Plan
from gossamer.sync import buckets_of

MIB = 1 << 20
SLOW, FAST = Link(latency_s=1e-3, bytes_per_s=2e6), Link(latency_s=1e-4, bytes_per_s=1e9)
FLAT_FAST = Network(islands=((0, 1, 2, 3),), levels={"all": FAST})
FLAT_SLOW = Network(islands=((0, 1, 2, 3),), levels={"all": SLOW})


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

    def seconds_of(self, exchange: object, *where: object) -> float:
        self.timed.append(type(exchange).__name__)
        return self.encoding_s


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
        monkeypatch.setattr(exchange_selection, "probe", lambda channel, **_: next(here.links))
        monkeypatch.setattr(exchange_selection, "profile_step", here.rehearse)
        monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.5)
        monkeypatch.setattr(exchange_methods, "seconds_of", here.seconds_of)
        exchanger = ExchangeSelector(
            engine=SimpleNamespace(module=module),  # type: ignore[arg-type]
            feed=None,  # type: ignore[arg-type]
            pump=SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(4)), busy_s=1.0),  # type: ignore[arg-type]
            run=SelectionSettings(lossy=lossy, steps=1000),
            plan=Plan(**{**PLAN, **plan}),
            tell=lambda message, step: here.told.append(message),
            keep=here.kept.append,
        )
        return exchanger, here

    return make


PLAN: dict[str, Any] = {
    "mesh": MeshSizes(replica=4),
    "batch_fractions": (1.0,) * 4,
    "rows": (1,) * 4,
    "microbatches": (1,) * 4,
    "exchange": "auto",
}


def drift(exchanger: ExchangeSelector, step: int, rate: float) -> Replan | None:
    """One look at the links, where the messages of the last window passed at this rate."""
    watch, pump = exchanger._watch, exchanger.pump
    watch.sent_bytes, watch.busy_s = pump.channel.meter.total_bytes - int(rate), pump.busy_s - 1.0
    return exchanger.replan(step)


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
    for turn in range(1, len(found)):
        before = exchanger.plan
        watch = exchanger._watch
        assert exchanger.replan(watch.every * turn) is None or not watch.first, "a first window is the measure"
        watch.first = 1.0
        changed = drift(exchanger, exchanger._watch.every * turn, rate=1e9)
        plans.append(exchanger.plan)
        assert here.told[-1].startswith("the links have drifted") and here.kept[-1] == exchanger.plan
        if changed is None:
            assert (exchanger.plan.exchange, exchanger.plan.bucket_bytes) == (before.exchange, before.bucket_bytes)
        else:
            assert changed.bucket_bytes == exchanger.plan.bucket_bytes
        assert exchanger._watch.first == 0.0, "the window after a look is the new measure"
        rules = ParameterRules.read(exchanger.plan.exchange).by_name(here.params)
        for layout, one in buckets_of(here.params, rules, bucket_bytes=exchanger.plan.bucket_bytes):
            one.check(layout, exchanger.pump.channel.levels)
        if not lossy:
            assert all(one.traits.lossless or not one.traits.remembers for one in rules.values())
    assert here.rehearsed == [0], "gradients are looked at once"
    assert any(plan.exchange != plans[0].exchange for plan in plans), "nothing has changed: this proves nothing"


def test_prices_are_of_their_own_candidate(world) -> None:
    """On islands the third column is bf16 between islands, and not what was third where all ranks were one."""
    exchanger, here = world([FLAT_FAST])
    exchanger.settle(automatic=True, hosts=2)
    measured = exchanger._measured
    assert measured is not None
    flat = measured.facts(FLAT_SLOW, CANDIDATES, MIB)
    exchanger.pump.channel.widen(ProcessGroups.islands([(0, 1), (2, 3)]))
    wide = measured.facts(PAIRS, across_islands(CANDIDATES), MIB)
    for one, other in zip(flat.buckets, wide.buckets, strict=True):
        losses = [None if o is None else o.loss for o in one.options]
        assert [None if o is None else o.loss for o in other.options] == [0.0, *losses]
    count = len(here.timed)
    measured.facts(islands((0, 1), (2, 3)), across_islands(CANDIDATES), MIB)
    assert len(here.timed) == count, "what is known is not measured again"
    measured.facts(PAIRS, across_islands(CANDIDATES), 2 * MIB)
    assert len(here.timed) > count, "other buckets have prices of their own"


@pytest.mark.parametrize(
    ("link", "size"),
    [
        (Link(latency_s=1e-4, bytes_per_s=1e6), MIB),
        (Link(latency_s=1e-3, bytes_per_s=1e8), 4_000_000),
        (Link(latency_s=1e-2, bytes_per_s=1e9), BUCKET_BYTES),
    ],
)
def test_buckets_are_forty_latencies_of_wire(link: Link, size: int) -> None:
    flat, far = Network(islands=((0, 1),), levels={"all": link}), Link(latency_s=5.0, bytes_per_s=1e9)
    assert link_use.bucket_bytes_for(flat, BUCKET_BYTES) == size
    apart = Network(islands=((0,), (1,)), levels={"all": far, "island": far, "between": link})
    assert link_use.bucket_bytes_for(apart, BUCKET_BYTES) == size, "between islands is where messages wait"


def test_other_messages_pass_at_another_rate(world) -> None:
    """So after a change, whoever asked for it, the next window is the measure."""
    exchanger, here = world([FLAT_FAST])
    exchanger.settle(automatic=True, hosts=2)
    exchanger._watch.first = 1e9
    assert exchanger.change(exchanger.plan.exchange, 3, "adapted", adapted_from="") is None
    assert exchanger._watch.first == 1e9
    changed = exchanger.change({"topk": {"fraction": 0.1}}, 4, "adapted", adapted_from="dense")
    assert changed is not None and exchanger._watch.first == 0.0
    assert changed.bucket_bytes == exchanger.plan.bucket_bytes == BUCKET_BYTES and here.kept == [exchanger.plan]


def test_buckets_grow_again_with_another_exchange_and_stay_with_the_one_in_force(world, monkeypatch) -> None:
    """What goes on, goes on in its own buckets, which the plan says; what begins is cut for the links of its day."""
    wide = Network(islands=((0, 1, 2, 3),), levels={"all": Link(latency_s=1e-2, bytes_per_s=8e6)})
    exchanger, here = world([FLAT_SLOW, wide, wide, FLAT_SLOW])
    int8, int4 = (
        MethodConfig("error_feedback", {"inner": {"two_shot": {"codec": c}}}).written() for c in ("int8", "int4")
    )
    chosen = iter([int8, int8, int4, "dense"])
    real = exchange_selection.choose
    monkeypatch.setattr(exchange_selection, "choose", lambda *a, **k: replace(real(*a, **k), written=next(chosen)))
    plans = [exchanger.settle(automatic=True, hosts=2)]
    for turn in range(3):
        exchanger._watch.first = 1.0
        changed = drift(exchanger, exchanger._watch.every * (turn + 1), rate=1e9)
        plans.append(exchanger.plan)
        assert (changed is None) == (turn == 0) and here.kept[-1] == exchanger.plan
        assert changed is None or changed.bucket_bytes == exchanger.plan.bucket_bytes
    assert [plan.bucket_bytes for plan in plans] == [MIB, MIB, 3_200_000, BUCKET_BYTES]
    assert plans[1].forecast.wire_bytes == plans[0].forecast.wire_bytes


def test_what_a_run_resumed_from_was_cut_for_is_no_bound(world) -> None:
    int8 = {"error_feedback": {"inner": {"two_shot": {"codec": "int8"}}}}
    resumed, _ = world([FLAT_FAST], exchange=int8, bucket_bytes=MIB)
    given, _ = world([FLAT_FAST], bucket_bytes=4 * MIB)
    sharded, _ = world([FLAT_FAST], exchange=int8, bucket_bytes=4 * MIB, sharding="zero1")
    found = [one._most_bucket_bytes for one in (resumed, given, sharded)]
    assert found == [BUCKET_BYTES, 4 * MIB, 4 * MIB]


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
    exchanger._watch.first = 1.0
    drift(exchanger, 20, rate=1e9)
    assert here.rehearsed == [0, 1, 2, 20] and "not finite" not in exchanger.plan.reasons["exchange"]


def test_a_number_that_is_none_is_refused_by_name_and_rank(world) -> None:
    exchanger, here = world([FLAT_SLOW])
    here.encoding_s = float("nan")
    with pytest.raises(BadInput, match=r"finite cpu_s of all-reduce for bucket 0, got nan on rank 0"):
        exchanger.settle(automatic=True, hosts=2)


def test_a_drift_is_a_factor_of_two_either_way(world) -> None:
    """Of the window right after the choice; what passed before that was no training."""
    exchanger, here = world([FLAT_FAST] * 3)
    exchanger.settle(automatic=True, hosts=2)
    for step, rate in ((20, 1e9), (40, 1.9e9), (60, 0.6e9)):
        assert drift(exchanger, step, rate) is None
    assert exchanger._watch.first == 1e9 and len(here.told) == 1, "neither is a drift"
    drift(exchanger, 80, 0.4e9)
    assert len(here.told) == 2 and exchanger._watch.every == 40, "slower counts; looks get rarer"
    drift(exchanger, 100, 1e9)
    assert exchanger._watch.first == 0.0, "not asked in between"
    for step, rate in ((120, 1e9), (160, 2.1e9)):
        drift(exchanger, step, rate)
    assert len(here.told) == 3, "so does faster, than in the first window after that look"
