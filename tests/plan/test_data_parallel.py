"""The planner of replicas, asked about parameters that are nowhere but in the question."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from gossamer import plan, recipe
from gossamer.plan import Request
from gossamer.plan.exchange import PERIODS, written_of
from gossamer.sharding import UnshardOrder
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import BUCKET_BYTES, Plan

MIB = 1 << 20


def planned(mib: int, states: Any, *, ranks: int = 2) -> Plan:
    """For so much of float32 gradients."""
    config = RunConfig.model_validate(
        {"model": {"hf": "x"}, "data": {"source": "stdlib"}, "plan": {"sharding": states}}
    )
    module = nn.Linear(1024, mib * MIB // 4096, bias=False, device="meta")
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return plan.build("data_parallel").plan(Request(config, ranks, shapes=shapes, walk=UnshardOrder.of(module, ())))


@pytest.mark.parametrize("states", ["zero1", "zero2", "zero3"])
def test_what_is_under_way_is_little_of_what_sharded_states_save(states: str) -> None:
    """A 64th of the gradients, neither less than what keeps a line busy nor more than whole states take."""
    assert planned(512, states).bucket_bytes == 8 * MIB
    assert planned(16, states).bucket_bytes == 4 * MIB
    assert planned(64 * 1024, states).bucket_bytes == BUCKET_BYTES


def test_whole_states_have_large_buckets() -> None:
    assert planned(512, "none").bucket_bytes == BUCKET_BYTES


def asking_for_auto(train: dict[str, Any], **more: Any) -> RunConfig:
    asked = {"sync": "auto", "lossy": True, **more}
    return RunConfig.model_validate({"model": {"hf": "x"}, "plan": asked, "train": {"steps": 1000, **train}})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"proximal": {}}}, r"\(train\.optimizer: wanted plan\.sync every_step, as .* averages of weights"),
    ({"adversarial": {"epsilon": 0.1}}, r"\(train\.adversarial: wanted no pipeline stages and a gradient exchange at"),
    ({"loss": {"taid": {"teacher": "t"}}}, r"\(train\.loss: wanted plan\.sync every_step with taid"),
    ({"loss": {"hidden": {"output": {"kl": {"teacher": "t"}}}}}, r"\(train\.loss: wanted gradients that are averaged"),
    ({"verify": {"every": 10}}, r"\(train\.verify\.every: wanted replicas that hold the full model"),
]


@pytest.mark.parametrize(("train", "why"), REFUSED, ids=[str(train) for train, _ in REFUSED])
def test_local_updates_that_a_law_refuses_are_not_chosen(train: dict[str, Any], why: str) -> None:
    """Else the run would end before step 1, once slow links have had them chosen."""
    config = asking_for_auto(train)
    found = plan.build("data_parallel").plan(Request(config, 4))
    period = next(one for one in PERIODS if not one.second_moments)
    with pytest.raises(BadInput):
        recipe.check(config, found.model_copy(update={"sync": written_of(period, 3, 1000), "exchange": "dense"}))
    assert (found.sync, found.exchange) == ("every_step", "auto")
    assert re.match(rf"every step: local updates are refused {why}", found.reasons["sync"]), found.reasons["sync"]


@pytest.mark.parametrize("optimizer", ["adamw", {"sgd": {"momentum": 0.9}}], ids=str)
def test_local_updates_that_are_lawful_may_be_chosen(optimizer: Any) -> None:
    config = asking_for_auto({"optimizer": optimizer})
    found = plan.build("data_parallel").plan(Request(config, 4))
    assert found.sync == "auto" and "sync" not in found.reasons
    for period in PERIODS:
        if bool(period.second_moments) == (optimizer == "adamw"):
            recipe.check(config, found.model_copy(update={"sync": written_of(period, 3, 1000), "exchange": "dense"}))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"sharding": "zero1"}, "every step: local updates cannot be chosen with sharded states"),
        ({"adapt": "bcrs"}, "every step: local updates cannot be chosen with plan.adapt"),
        ({"mesh": {"pipe": 2}, "lossy": False}, "every step: local updates are refused (plan.sync: wanted no pipeline"),
    ],
    ids=str,
)
def test_local_updates_that_the_choice_does_not_know_are_not_chosen(more: dict[str, Any], why: str) -> None:
    found = plan.build("data_parallel").plan(Request(asking_for_auto({}, **more), 4))
    assert found.sync == "every_step" and found.reasons["sync"].startswith(why)


def test_a_law_that_refuses_auto_says_what_to_change() -> None:
    with pytest.raises(BadInput, match=r"set train\.seconds to 0"):
        plan.build("data_parallel").plan(Request(asking_for_auto({"seconds": 60.0}), 4))
