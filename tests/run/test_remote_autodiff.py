"""Branches, skips, shared blocks and collected losses across processes: every parameter moves as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.cuttable import MODULES
from run.test_trainer import losses

SCHEDULES: list[Any] = ["one_f_one_b", {"recompute": {"split_backward": {"inner": "gpipe"}}}]
KINDS = [*sorted(MODULES), "bare"]
BY_NIGHT = ("chain", "experts", "residual_cnn", "u_net")  # cut in one process by day: tests/model/test_cut.py


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(
            kind, SCHEDULES[(index + late) % 2], marks=[pytest.mark.nightly] if late or kind in BY_NIGHT else []
        )
        for late in (0, 1)
        for index, kind in enumerate(KINDS)
    ],
)
def test_every_parameter_moves_as_in_one_process(pool, tmp_path: Path, kind: str, schedule: Any) -> None:
    (whole,) = pool.run("run.remote_jobs:train", 1, kind=kind, folder=str(tmp_path / "one"), plan={})
    plan = {"mesh": {"pipe": 3}, "pipeline_schedule": schedule}
    ranks = pool.run("run.remote_jobs:train", 3, kind=kind, folder=str(tmp_path / "three"), plan=plan)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert {name for held in ranks for name in held} == set(whole)
    for held in ranks:
        for name, numbers in held.items():
            assert numbers == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
