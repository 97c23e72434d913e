"""What a step takes beside its gradients' exchange: an update timed before training, and rows that are waited for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import optimizer
from gossamer.autotune import update_time
from gossamer.autotune.step_remainder import StepRemainder
from gossamer.autotune.update_time import update_seconds
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import ProcessGroups
from gossamer.optimizer import Optimizer
from gossamer.plan.exchange import MessagePrice
from gossamer.recipe import PlanMethods
from gossamer.sharding import _sharded_parameters, holdings, shapes_of
from gossamer.sharding import build as sharding_of
from gossamer.spec import records
from gossamer.spec.cost import Cost
from gossamer.spec.network import Link, Network
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.sync._step_gathers import StepGathers
from model.tiny import LLAMA

ADAMW = optimizer.build({"adamw": {"lr": 1e-3}})


class Seen(Optimizer):
    """An optimizer that takes a second for every row, by a clock of its own, and keeps what it was given."""

    lr = 1.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.given = 0.0, list[dict[str, tuple[int, ...]]]()
        monkeypatch.setattr(update_time.time, "perf_counter", lambda: self.now)

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def init(self, params: Any) -> Any:
        return {name: {} for name in params}

    def update(self, params: Any, grads: Any, state: Any, *, lr_scale: float, step: int) -> None:
        assert params.keys() == grads.keys() == state.keys()
        self.given.append({name: tuple(p.shape) for name, p in params.items()})
        self.now += sum(len(p) for p in params.values())


def params_of(*rows: int) -> dict[str, Tensor]:
    return {f"w{i}": nn.Parameter(torch.ones(count, 8)) for i, count in enumerate(rows)}


def held(params: dict[str, Tensor], sharding: str, rank: int = 0) -> Any:
    return holdings(sharding_of(sharding).deal(ProcessGroups.flat(2)), shapes_of(params), rank)


def test_an_update_of_own_rows_is_timed_and_leaves_no_trace() -> None:
    params = params_of(64, 3)
    before, drawn = {n: p.detach().clone() for n, p in params.items()}, torch.random.get_rng_state()
    assert update_seconds(ADAMW, params, held(params, "zero1")) > 0
    assert all(torch.equal(params[n], one) for n, one in before.items())
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_a_rank_updates_what_it_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    params, rule = params_of(64, 6), Seen(monkeypatch)
    assert update_seconds(rule, params, held(params, "none")) == 70
    assert update_seconds(rule, params, held(params, "zero1")) == 35
    assert rule.given[-1] == {"w0": (32, 8), "w1": (3, 8)}
    assert update_seconds(rule, {}, {}) == 0


def test_what_is_too_much_to_time_is_taken_to_be_like_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    params, rule = params_of(40, 40, 20), Seen(monkeypatch)
    monkeypatch.setattr(update_time, "_MOST_NUMEL", 320)
    assert update_seconds(rule, params, held(params, "none")) == 100
    assert rule.given == [{"w0": (40, 8)}] * 3, "after a group of 120 s there is no time for another"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sharding", ["none", "zero1"])
@pytest.mark.parametrize("name", optimizer.names())
def test_every_optimizer_can_be_timed(name: str, sharding: str, dtype: torch.dtype) -> None:
    """A run that trains must not end before its first step because it was forecast."""
    rule = optimizer.build(name)
    if sharding != "none" and not rule.by_element:
        sharding = "whole"
    shapes = ((17, 9), (9,), (), (1, 1), (0, 3), (2, 3, 4), (41, 131), (64, 8, 3, 3))
    params: dict[str, Tensor] = {
        f"layer.{i}.weight": nn.Parameter(torch.rand(s).to(dtype)) for i, s in enumerate(shapes)
    }
    deal = sharding_of({"zero1": {"whole": True}} if sharding == "whole" else sharding).deal(ProcessGroups.flat(2))
    for rank in range(2):
        taken_s = update_seconds(rule, params, holdings(deal, shapes_of(params), rank))
        assert taken_s > 0 or rule.wants_vectors(params)


def remainder(sharding: Any, rule: Optimizer | None = ADAMW) -> StepRemainder:
    channel, method = LoopbackChannel(0, ProcessGroups.flat(2)), sharding_of(sharding)
    return StepRemainder.measured(params_of(64), rule, method, method.deal(channel.levels), None, channel)


def test_ranks_agree_in_a_hop_before_they_update() -> None:
    link = Link(latency_s=0.25, bytes_per_s=1024.0, hop_s=0.5)
    links = Network(islands=((0, 1),), levels={"all": link})
    each = {"batch_fractions": (1.0, 1.0), "rows": (1, 1), "microbatches": (1, 1)}
    methods = PlanMethods.of(Plan(mesh=MeshSizes(replica=2), sharding="zero1", exchange="dense", **each))
    one, basis = remainder("zero1"), SimpleNamespace(links=links, price=MessagePrice())
    before = Cost(step_s=3.0, compute_s=2.0, exposed_s=1.0, sent_bytes=(7, 7))
    cost = one.added(before, methods, basis, ProcessGroups.flat(2))  # type: ignore[arg-type]
    assert cost.update_s == one.update_s > 0
    assert cost.exposed_s == 1.0 + 64 * 8 * 4 / 2 / 1024 + 0.5 + 0.5, "rows of the other rank, and the vote"
    assert cost.step_s == pytest.approx(cost.compute_s + cost.exposed_s + cost.update_s)
    assert (cost.compute_s, cost.sent_bytes) == (2.0, (7, 7))


def test_many_ranks_agree_in_as_many_hops_as_a_gather_has() -> None:
    """Five ranks: the rows of one, of two and of four. Among islands the ring leaves each of them once."""
    links = Network(islands=((0, 1, 2, 3, 4),), levels={"all": Link(latency_s=0.25, bytes_per_s=1e6, hop_s=0.5)})
    each = {"batch_fractions": (1.0,) * 5, "rows": (1,) * 5, "microbatches": (1,) * 5}
    methods = PlanMethods.of(Plan(mesh=MeshSizes(replica=5), exchange="dense", **each))
    one, basis = remainder("none"), SimpleNamespace(links=links, price=MessagePrice())
    cost = one.added(Cost(step_s=3.0, compute_s=2.0), methods, basis, ProcessGroups.flat(5))  # type: ignore[arg-type]
    assert (cost.exposed_s, cost.update_s) == (3 * 0.5, one.update_s)
    near = {"island": Link(latency_s=0.01, bytes_per_s=1e6)}
    links = links.model_copy(update={"levels": {**links.levels, **near}})
    basis, levels = SimpleNamespace(links=links, price=MessagePrice()), ProcessGroups.islands([(0, 1, 2), (3, 4)])
    cost = one.added(Cost(step_s=3.0, compute_s=2.0), methods, basis, levels)  # type: ignore[arg-type]
    assert cost.exposed_s == pytest.approx(2 * 0.5 + 2 * 0.01)


def test_an_update_that_is_not_known_is_none() -> None:
    assert remainder("none", None).update_s == 0


def test_a_step_does_not_count_as_computing_what_it_waits_for_in_the_midst_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sharded parameters a unit may be waited for in forward and backward; both together are within the step."""
    real = _sharded_parameters._UnshardedUnit.wait

    def wait(unit: Any) -> None:
        time.sleep(0.05 if unit.under_way is not None else 0.0)
        real(unit)

    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", os.environ.get("THP_MEM_ALLOC_ENABLE", "0"))
    monkeypatch.setattr(_sharded_parameters._UnshardedUnit, "wait", wait)
    done = gossamer.train(
        {"hf": "llama", "config": LLAMA},
        [{"input_ids": torch.arange(16) % 50, "labels": torch.arange(16) % 50}] * 16,
        {
            "train": {"batch": 4, "steps": 3, "evaluate_every": 0, "checkpoint_every": 0},
            "plan": {"sharding": "zero3", "exchange": "dense"},
            "run": {"directory": str(tmp_path), "display": "quiet"},
        },
    )
    steps = [one for one in done.run.records() if isinstance(one, records.Step)]
    assert len(steps) == 3
    for one in steps:
        assert one.exposed_s > 0.1 and one.compute_s + one.exposed_s <= one.step_s


def test_a_step_does_not_count_as_computing_what_its_hooks_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that is full in the midst of a backward pass waits for the weights of a late rank."""
    weights = StepGathers.weights

    def late(self: StepGathers) -> Tensor:
        if self._weights is None:
            self._timing.timed_wait(lambda: time.sleep(0.1))
        return weights(self)

    monkeypatch.setattr(StepGathers, "weights", late)
    done = gossamer.train(
        {"hf": "llama", "config": LLAMA},
        [{"input_ids": torch.arange(16) % 50, "labels": torch.arange(16) % 50}] * 16,
        {
            "train": {"batch": 4, "steps": 3, "evaluate_every": 0, "checkpoint_every": 0},
            "run": {"directory": str(tmp_path), "display": "quiet"},
        },
    )
    for one in [one for one in done.run.records() if isinstance(one, records.Step)]:
        assert one.exposed_s > 0.1 and one.compute_s + one.exposed_s <= one.step_s
