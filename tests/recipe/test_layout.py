"""The layout of a run on its ranks: refused by the same sentence where a run is planned and where a plan is given."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer import recipe
from gossamer.plan import Request, build
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan

RANKS = 4


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"train": {"batch": 8}, **sections})


def planned(asked: RunConfig) -> Plan:
    return build("data_parallel").plan(Request(asked, RANKS))


@pytest.mark.parametrize(
    "sections",
    [
        {"plan": {"mesh": {"pipe": 3}}},
        {"plan": {"mesh": {"replica": 3}}},
        {"plan": {"batch_fractions": [1, 1, 1]}},
        {"plan": {"stage_ranks": [[0, 1, 2, 3]]}},
        {"plan": {"stage_ranks": [[0, 1], [2]]}},
        {"plan": {"stage_ranks": [[0, 1], [2, 3]], "mesh": {"pipe": 3}}},
        {"plan": {"stage_ranks": [[0, 1], [2, 3]], "batch_fractions": [1, 2]}},
        {"plan": {"stage_ranks": [[0, 1], [2, 3]]}, "train": {"batch": 8, "accumulate": 1}},
        {"train": {"batch": 8, "accumulate": 3}},
    ],
)
def test_a_given_plan_is_refused_as_planning_is(sections: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as refused:
        planned(config(**sections))
    with pytest.raises(BadInput) as again:
        recipe.check(config(**sections), planned(config()))
    assert str(again.value) == str(refused.value)


@pytest.mark.parametrize("inner", [{"topk": {"fraction": 0.1}}, "dense"])
def test_a_policy_without_settings_to_choose_from_is_refused_when_planned(inner: Any) -> None:
    asked = {"exchange": {"error_feedback": {"inner": inner}}, "adapt": "l_greco"}
    with pytest.raises(BadInput, match=r"plan\.adapt: wanted an exchange with a rank or a codec"):
        planned(config(plan=asked))
    planned(config(plan={**asked, "exchange": {"error_feedback": {"inner": {"powersgd": {"rank": 2}}}}}))
