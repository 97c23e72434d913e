"""Recompute of units within pipeline stages: the same bits as without, with less kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.view.run_directory import RunDirectory
from pool import Pool

EVERY_SECOND = {"recompute": {"every": 2}}


@pytest.mark.parametrize(
    ("plan", "budget"),
    [
        ({"pipeline_schedule": "one_f_one_b"}, "12.5kB"),
        ({"pipeline_schedule": {"split_backward": {"inner": "gpipe"}}}, "30kB"),
        pytest.param({"pipeline_schedule": "one_f_one_b", "mesh": {"pipe": 3}}, "12.5kB", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_recomputed_units_of_stages_change_no_bit(
    pool: Pool, tmp_path: Path, plan: dict[str, Any], budget: str
) -> None:
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
        for place, savers in enumerate(([], [EVERY_SECOND], ["recompute"], [{"recompute": {"budget": budget}}]))
    ]
    digests = [[one["held"] for one in each] for each in found]
    assert digests[0] == digests[1] == digests[2] == digests[3]
    written = RunDirectory(tmp_path / "3" / "run").plan()
    assert written is not None and isinstance(written.savers[0], dict)
    assert written.savers[0]["recompute"]["units"], "the budget asks for some"


def test_units_that_change_python_state_are_refused_in_stages(pool: Pool, tmp_path: Path) -> None:
    plan = {"mesh": {"pipe": 2}, "exchange": "dense", "savers": [{"recompute": {"units": ["layers.0", "layers.2"]}}]}
    found = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), sections={"plan": plan}, steps=1, kind="counting")
    assert any("changes no Python state" in one["error"] for one in found)
