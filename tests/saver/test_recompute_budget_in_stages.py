"""A budget of recompute in pipeline stages: what the plan says each rank takes, beside what the allocator counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import loss
from gossamer.job.memory_forecast import MemoryForecast
from gossamer.model.source.hf import Hf
from gossamer.model.split.in_flight import InFlight
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import Planned, planned
from gossamer.partition.request import PartitionRequest
from gossamer.pipeline.from_plan import schedule_of
from gossamer.recipe import PlanMethods
from gossamer.run.batches import DatasetBatches, Feed
from gossamer.run.engine import engine_of, pieces_of
from gossamer.run.parts import Parts
from gossamer.spec.action import Op
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.units import read_size
from model.tiny import batch
from saver.training import Busy

SIZES = {"n_embd": 96, "n_layer": 6, "n_head": 4, "n_positions": 64}
ROWS, SEQUENCE = 16, 64
CUTS = ["transformer.wte", "transformer.h.4"]  # more blocks first, where more micro-batches are alive


def looked_at(budget: str, *, rank: int = 0, module: Any = None, **given: Any) -> Planned:
    """The planned run of two stages with this budget, as a rank sees it; "" for none."""
    plan = {"mesh": {"pipe": 2}, **({"cuts": CUTS} if module is None else {}), **given}
    if budget:
        plan["savers"] = [{"recompute": {"budget": budget}}]
    rows = batch(rows=ROWS, sequence=SEQUENCE)
    names = {"input_ids": "input_ids" if module is None else "x", "labels": "labels"}
    items = [{names[name]: value[i] for name, value in rows.items()} for i in range(ROWS)]
    asked = PartitionRequest(
        config=RunConfig.model_validate({"train": {"batch": 8, "accumulate": 4}, "plan": plan}),
        ranks=2,
        rank=rank,
        batches=DatasetBatches(items),
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    built = Hf("gpt2", SIZES).fitted_to_tokenizer(257, SEQUENCE).build(0) if module is None else module
    return planned(ModuleSource(built), asked)


def units_of(plan: Plan) -> list[str]:
    (saver,) = plan.savers
    assert isinstance(saver, dict)
    return list(saver["recompute"]["units"])


def activations(found: Planned) -> list[int]:
    return [one.activations for one in MemoryForecast.of(found, local_ranks=2).ranks]


def measured(found: Planned, rank: int) -> int:
    """The most bytes that one rank's micro-batches take in its part of the schedule, by the events of the allocator."""
    held, asked, plan = found.hold(), found.asked, found.plan
    parts = Parts(
        module=held.module,
        objective=asked.objective,
        train=asked.batches,
        validation={},
        config=asked.config,
        plan=plan,
        device=asked.device,
        cut=held.cut,
    )
    engine = engine_of(parts)
    (stage,) = pieces_of(parts, engine).values()
    pieces = Feed(asked.batches, plan, 0, asked.config.train.seed).fetch(0)
    for p in held.module.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad and p.device.type != "meta" else None

    def step() -> None:
        live = dict[int, InFlight]()
        for action in schedule_of(plan, 0, PlanMethods.of(plan).schedule).ranks[rank]:
            if action.op is Op.F:
                piece = pieces[action.batch]
                edges = stage.boundary(piece.rows).receives
                received = {one.value: torch.zeros(one.form.shape, dtype=one.form.dtype) for one in edges}
                live[action.batch] = stage.forward(piece, 0, received)
                del received
            elif action.op is Op.B:
                one = live.pop(action.batch)
                ones = {value: torch.ones_like(x) for value, x in one.sent.items()}
                with engine.randomness.at(0, pieces[action.batch].key):
                    one.backward(ones, loss=one.result if isinstance(one.result, Tensor) else None)
                del one, ones

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watch:
        step()
    events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
    there = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        there += event.nbytes()
        most = max(most, there)
    return most


@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("gpipe", marks=pytest.mark.nightly)])
def test_each_rank_takes_what_the_plan_says(schedule: str) -> None:
    """A budget between all and nothing, of two ranks of which one has more micro-batches alive under 1F1B."""
    plain = activations(looked_at("", pipeline_schedule=schedule))
    budget = round(0.6 * max(plain))
    for rank in range(2):
        found = looked_at(f"{budget}B", rank=rank, pipeline_schedule=schedule)
        said = activations(found)
        assert max(said) <= budget < max(plain) and 0 < len(units_of(found.plan)) < 6
        assert measured(found, rank) == pytest.approx(said[rank], rel=0.05)


@pytest.mark.nightly
def test_ranks_agree_and_a_plan_that_names_the_units_keeps_them() -> None:
    first, second = (looked_at("6MB", rank=rank) for rank in range(2))
    assert first.plan == second.plan and units_of(first.plan)
    again = planned(first.source.again(), first.asked, first.plan)
    assert again.plan.savers == first.plan.savers
    why = first.plan.reasons["savers"]
    assert "stage 0 (rank 0), with 2 micro-batches alive" in why and "stage 1 (rank 1), with 1 micro-batch alive" in why


@pytest.mark.nightly  # by day: that a set is the best of all, in test_cheapest_set.py
def test_the_set_is_the_cheapest_that_fits() -> None:
    """Blocks are alike: one fewer on any stage that recomputes some, and that stage is above the budget."""
    found = looked_at("6MB")
    chosen, budget = units_of(found.plan), read_size("6MB", key="")
    assert max(activations(found)) <= budget
    for left_out in chosen:
        fewer = {"recompute": {"units": [name for name in chosen if name != left_out]}}
        assert max(activations(looked_at("", savers=[fewer]))) > budget


@pytest.mark.nightly
def test_a_budget_that_no_set_meets_names_the_stage_and_the_smallest_that_works() -> None:
    with pytest.raises(BadInput, match=r"a budget of at least \d+ bytes.* stage 0 \(rank 0\) take") as raised:
        looked_at("100kB")
    assert "with 2 micro-batches alive" in str(raised.value)
    least = int(str(raised.value).split("at least ")[1].split()[0])
    assert max(activations(looked_at(f"{least}B"))) <= least
    with pytest.raises(BadInput, match=f"a budget of at least {least} bytes"):
        looked_at(f"{least - 1}B")


def test_units_that_change_python_state_are_not_chosen() -> None:
    """Other stages follow their state, so `units` refuses them there: a budget that needs them has no set."""
    cuts = ["embed", "blocks.2"]
    plain = max(activations(looked_at("", module=Busy(layers=4), cuts=cuts)))
    assert units_of(looked_at(f"{plain}B", module=Busy(layers=4), cuts=cuts).plan) == []
    with pytest.raises(BadInput, match=f"a budget of at least {plain} bytes"):
        looked_at(f"{plain - 1}B", module=Busy(layers=4), cuts=cuts)


@pytest.mark.nightly
def test_replicas_share_the_units_of_the_largest_load() -> None:
    """With two replicas the ranks of a stage are named together."""
    asked = looked_at("").asked
    config = asked.config.model_copy(
        update={
            "plan": asked.config.plan.model_copy(update={"savers": [{"recompute": {"budget": "1kB"}}]}),
            "train": asked.config.train.model_copy(update={"accumulate": 2}),
        }
    )
    source = ModuleSource(Hf("gpt2", SIZES).fitted_to_tokenizer(257, SEQUENCE).build(0))
    with pytest.raises(BadInput, match=r"stage 0 \(ranks 0, 2\)"):
        planned(source, replace(asked, config=config, ranks=4))
