"""What a wrap leaves behind where its model is wrapped again, or let go, and where its gradients are kept."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pool import Pool


def test_a_step_is_rejected_once_and_for_all_by_the_last_wrap(pool: Pool) -> None:
    found = pool.run("own_loop.again_jobs:rejected", 2)
    for one in found:
        assert one["rejected"] == 1
        assert len(one["said"]) == 1 and "of rank 1 is not finite" in one["said"][0]
        assert one["weights"] == found[0]["weights"]
    assert all(math.isfinite(weight) for row in found[0]["weights"] for weight in row)


@pytest.mark.parametrize("again", ["rank", "all"])
def test_a_model_that_is_let_go_is_as_it_was(pool: Pool, again: str) -> None:
    found = pool.run("own_loop.again_jobs:let_go", 2, again=again)
    last = "BatchNorm1dOverRanks" if again == "all" else "BatchNorm1d"
    for one in found:
        assert one["layers"] == ["BatchNorm1dOverRanks", "BatchNorm1d", "BatchNorm1dOverRanks", last]
        assert one["is_own"]
        assert one["weights"] == found[0]["weights"]
    alone = found[0]["alone"]
    assert alone["called"] == 1 and alone["largest"] <= 0.01 and alone["moved"] > 0
    assert found[0]["calls"] == found[1]["calls"] + 1


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "exchange", ["dense", {"two_shot": "int8"}, {"error_feedback": {"powersgd": {"rank": 2}}}, "recursive_doubling"]
)
def test_gradients_that_are_kept_stay_and_others_cost_no_memory(pool: Pool, exchange: Any, accumulate: int) -> None:
    for keeps, pieces in ((False, 1), (True, 6)):
        settings = {"exchange": exchange, "accumulate": accumulate, "keeps": keeps}
        assert pool.run("own_loop.again_jobs:memory", 2, **settings) == [pieces] * 2
