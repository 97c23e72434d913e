"""Runs in stages of models that keep things in Python: the numbers of one process, or refused input on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from run.test_trainer import losses

STAGES = {"train": {"accumulate": 4}, "plan": {"mesh": {"pipe": 2}, "cuts": ["embed", "layers.2"]}}


AGAIN = {"recompute": {"inner": "one_f_one_b"}}


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("counting", AGAIN),
        ("telling", "one_f_one_b"),
        ("masking", AGAIN),
        pytest.param("counting", "one_f_one_b", marks=pytest.mark.nightly),
        pytest.param("telling", AGAIN, marks=pytest.mark.nightly),
        pytest.param("masking", "one_f_one_b", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_python_values_cross(pool, tmp_path: Path, kind: str, schedule: object) -> None:
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "1"), steps=4, kind=kind, sections={"train": STAGES["train"]})
    sections = {**STAGES, "plan": {**STAGES["plan"], "pipeline_schedule": schedule}}
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "2"), steps=4, kind=kind, sections=sections)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
