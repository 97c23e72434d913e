"""The earlier spelling of recompute, as a schedule, becomes the saver."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.spec.config import PlanSection
from gossamer.spec.plan import Plan
from gossamer.spec.upgrade import configuration


@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        ("recompute", "one_f_one_b"),
        ({"recompute": {}}, "one_f_one_b"),
        ({"recompute": {"inner": "gpipe"}}, "gpipe"),
        ({"recompute": {"split_backward": {"inner": "gpipe"}}}, {"split_backward": {"inner": "gpipe"}}),
        ({"split_backward": {"inner": {"recompute": {"inner": "gpipe"}}}}, {"split_backward": {"inner": "gpipe"}}),
        ({"split_backward": {"inner": "recompute"}}, {"split_backward": {"inner": "one_f_one_b"}}),
    ],
)
def test_a_schedule_that_recomputes_is_a_saver_now(written: Any, schedule: Any) -> None:
    section = PlanSection.model_validate({"pipeline_schedule": written})
    assert (section.pipeline_schedule, section.savers) == (schedule, ["recompute"])
    plan = Plan.model_validate({"rows": [1], "microbatches": [1], "pipeline_schedule": written})
    assert (plan.pipeline_schedule, plan.savers) == (schedule, ("recompute",))


def test_savers_that_were_asked_for_stay() -> None:
    asked = {"pipeline_schedule": "recompute", "savers": ["cut_cross_entropy"]}
    assert PlanSection.model_validate(asked).savers == ["recompute", "cut_cross_entropy"]
    asked["savers"] = [{"recompute": {"every": 2}}]  # type: ignore[assignment]
    assert PlanSection.model_validate(asked).savers == [{"recompute": {"every": 2}}]
    assert PlanSection.model_validate({"pipeline_schedule": "gpipe"}).savers == "auto"


def test_a_parameter_that_is_called_as_a_method_was_keeps_its_name() -> None:
    written = {
        "plan": {"sharding": {"zero1": {"whole": True}}},
        "train": {"loss": {"taid": {"teacher": "a", "top_k": 8}}},
    }
    assert configuration(written) == written
    assert configuration({"plan": {"exchange": {"error_feedback": {"top_k": {"fraction": 0.1}}}}}) == {
        "plan": {"exchange": {"error_feedback": {"topk": {"fraction": 0.1}}}}
    }
