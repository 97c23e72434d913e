"""A gradient exchange beside local updates: what belongs to one group of ranks does not serve another one."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gossamer import recipe
from gossamer.autotune.local_updates import LocalUpdates
from gossamer.plan import Request, build
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan

TOPK = {"topk": {"fraction": 0.1}}
PAIRS = [[0, 1], [2, 3]]
SHARED: dict[str, Any] = {
    "ef21": {"ef21": TOPK},
    "ef21_sgdm": {"ef21_sgdm": {"inner": TOPK}},
    "econtrol": {"econtrol": {"inner": TOPK}},
    "delta_reference": {"error_feedback": {"delta_reference": TOPK}},
    "momentum": {"warmup": {"inner": {"momentum": "dense"}, "steps": 2}},
    "acp_sgd": [["head", "all", {"error_feedback": "acp_sgd"}], [".*", "all", "dense"]],
}
WARM: list[Any] = [
    {"diloco": {"sync_every": 4, "warmup_steps": 2}},
    {"local_sgd": {"sync_every": 4, "warmup_steps": 1}},
    "zero_one",
]


def planned(sync: Any, exchange: Any, islands: Any) -> Plan:
    given = {"train": {"batch": 8, "max_grad_norm": 0}, "plan": {"sync": sync, "exchange": exchange}}
    asked = RunConfig.model_validate({**given, "machines": {"islands": islands}})
    plan = build("data_parallel").plan(Request(asked, 4))
    recipe.check(asked, plan)
    return plan


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("sync", WARM, ids=str)
def test_the_same_ranks_must_always_meet(sync: Any, name: str) -> None:
    with pytest.raises(BadInput, match=rf"plan\.exchange: wanted local updates from the first step.* got {name} in"):
        planned(sync, SHARED[name], PAIRS)
    for islands in ([[0], [1], [2], [3]], [[0, 1, 2, 3]], "auto"):  # which are asked again where they are known
        planned(sync, SHARED[name], islands)
    planned({"diloco": {"sync_every": 4}}, SHARED[name], PAIRS)


@pytest.mark.parametrize(
    "exchange",
    [
        {"error_feedback": TOPK},
        {"error_feedback": {"powersgd": {"rank": 2}}},
        {"hierarchical": {"inter": {"ef21": TOPK}}},
        {"two_shot": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sync", WARM, ids=str)
def test_what_any_ranks_can_share_is_lawful(sync: Any, exchange: Any) -> None:
    planned(sync, exchange, PAIRS)


def test_islands_that_a_start_finds_are_asked_too() -> None:
    plan, nothing = planned(WARM[0], SHARED["ef21"], "auto"), cast("Any", None)
    loop = recipe.PlanMethods.of(plan).sync.loop
    assert plan.islands == () and loop is not None
    updates = LocalUpdates(plan=plan, engine=nothing, feed=nothing, channel=nothing, tell=nothing)
    with pytest.raises(BadInput, match=r"got ef21 in synchronous steps and inside the islands \[\[0, 1\], \[2, 3\]\]"):
        updates.part(loop, ((0, 1), (2, 3)), None, nothing)
