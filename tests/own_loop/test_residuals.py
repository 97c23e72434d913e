"""What exchanges keep from step to step is that of the optimizer that steps, and what they do not send is told."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.comm.message import ProcessGroups
from gossamer.own_loop.gradient_buckets import LoopBuckets
from gossamer.own_loop.trained_parameters import TrainedParameters
from own_loop.residual_jobs import TOPK
from pool import Pool

RANDOM = {"random_k": {"fraction": 0.01}}


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
def test_optimizers_of_one_model_are_as_those_of_two(pool: Pool, head_first: bool, scales: bool) -> None:
    found, wanted = (
        pool.run("own_loop.residual_jobs:two_optimizers", 2, one_model=one_model, head_first=head_first, scales=scales)
        for one_model in (True, False)
    )
    assert found == wanted
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["rejected"] == [0, 0] if scales else [1, 0]


def test_parameters_of_one_bucket_that_come_to_two_optimizers_are_refused(pool: Pool) -> None:
    for said in pool.run("own_loop.residual_jobs:given_later", 2):
        assert "2.bias and 2.weight in one bucket" in said or "2.weight and 2.bias in one bucket" in said


def buckets_of_two(kind: torch.dtype = torch.float32) -> tuple[LoopBuckets, list[torch.optim.Optimizer]]:
    """Return buckets of a model that has two optimizers, and these, as they are held weakly."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(kind)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(one.parameters(), 0.1) for one in model]
    channel: Any = SimpleNamespace(levels=ProcessGroups.flat(2), rank=0)
    found = LoopBuckets(channel, TrainedParameters(model, optimizers, frozenset()), "dense", 1 << 20)
    found.add(dict(model.named_parameters()))
    return found, optimizers


def test_a_planned_bucket_of_two_optimizers_is_two_where_they_must_be_apart() -> None:
    buckets, _held = buckets_of_two()
    names = tuple(buckets.params)
    buckets.rebuild("dense", (names,), (0,))
    assert len(buckets.slots) == 1 and buckets.turns == (0,)
    buckets.rebuild(TOPK, (names,), (0,) * buckets.rounds[0])
    assert [{entry.name[0] for entry in slot.layout.entries} for slot in buckets.slots] == [{"0"}, {"1"}]
    assert buckets.turns == ()


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_a_sum_that_is_too_large_for_a_half_hides_nothing(kind: torch.dtype) -> None:
    buckets, _held = buckets_of_two(kind)
    buckets.rebuild({"two_shot": {"codec": "int8"}}, (), ())
    slot = buckets.slots[0]
    slot.bucket.flat.fill_(6e4)
    slot.add_own()
    assert not slot.hides
    slot.bucket.flat[0] = math.inf
    slot.add_own()
    assert slot.hides


@pytest.mark.parametrize("at", [3, 19])  # where ranks wait for each other before they step, and where they do not
@pytest.mark.parametrize("exchange", [RANDOM, {"error_feedback": {"inner": RANDOM}}], ids=["alone", "feedback"])
def test_a_gradient_that_is_not_sent_and_not_finite_rejects_the_step(pool: Pool, exchange: Any, at: int) -> None:
    found = pool.run("own_loop.residual_jobs:hidden", 2, exchange=exchange, at=at)
    assert found[0] == found[1]
    assert found[0]["seen"] == [at] and found[0]["rejected"] == 1
    assert len(found[0]["said"]) == 1 and "of rank 1 is not finite" in found[0]["said"][0]
    assert bool(torch.tensor(found[0]["weights"]).isfinite().all())


def test_a_frozen_parameter_stays_and_what_it_is_owed_waits(pool: Pool) -> None:
    for found in pool.run("own_loop.residual_jobs:frozen", 2):
        assert found["moved"] == 0.0 and found["is_none"]
        assert found["owed"] > 0.0 and found["kept"] and found["others"]
        assert found["moved_later"] > 0.0
