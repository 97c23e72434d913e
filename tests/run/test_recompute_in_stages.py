"""Recompute of units within pipeline stages: the same bits as without, with less kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool import Pool


@pytest.mark.parametrize(
    "plan",
    [
        {"pipeline_schedule": "one_f_one_b"},
        {"pipeline_schedule": {"split_backward": {"inner": "gpipe"}}},
        {"pipeline_schedule": "one_f_one_b", "mesh": {"pipe": 3}},
    ],
    ids=str,
)
def test_recomputed_units_of_stages_change_no_bit(pool: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    given = {"mesh": {"pipe": 2}, "exchange": "dense", **plan}
    ranks = given["mesh"]["pipe"]  # type: ignore[index]
    found = [
        pool.run(
            "run.jobs:train",
            ranks,
            folder=str(tmp_path / str(place)),
            sections={"plan": {**given, "savers": savers}, "train": {"accumulate": 4}},
            steps=3,
            dropout=0.1,
        )
        for place, savers in enumerate(([], [{"recompute": {"every": 2}}], ["recompute"]))
    ]
    digests = [[one["held"] for one in each] for each in found]
    assert digests[0] == digests[1] == digests[2]


def test_units_that_change_python_state_are_refused_in_stages(pool: Pool, tmp_path: Path) -> None:
    plan = {"mesh": {"pipe": 2}, "exchange": "dense", "savers": [{"recompute": {"units": ["layers.0", "layers.2"]}}]}
    found = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), sections={"plan": plan}, steps=1, kind="counting")
    assert any("changes no Python state" in one["error"] for one in found)
