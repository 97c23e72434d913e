"""Whole runs of a model in stages over gloo: the losses, gradients and bytes of one process, whatever the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run.test_trainer import losses, records

STAGES = {"train": {"accumulate": 4}}


def staged(stages: int, **plan: Any) -> dict[str, Any]:
    return {"train": {"accumulate": 4}, "plan": {"mesh": {"pipe": stages}, **plan}}


@pytest.mark.parametrize(
    ("ranks", "stages", "plan"),
    [
        (2, 2, {}),
        (3, 3, {}),
        (2, 2, {"schedule": "gpipe"}),
        (4, 4, {"cuts": ["embed", "layers.0", "layers.1", "norm"]}),
    ],
)
def test_losses_are_those_of_one_process(pool, tmp_path: Path, ranks: int, stages: int, plan: dict[str, Any]) -> None:
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=8, sections=STAGES, dropout=0.2)
    sections = staged(stages, **plan)
    pool.run("run.jobs:train", ranks, folder=str(tmp_path / "many"), steps=8, sections=sections, dropout=0.2)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    norms = [[r["grad_norm"] for r in records(tmp_path / name, "step")] for name in ("one", "many")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    evaluations = [records(tmp_path / name, "evaluation")[-1]["loss"] for name in ("one", "many")]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)


def test_replicas_of_stages(pool, tmp_path: Path) -> None:
    """Two unequal replicas of two stages, tied weights and all."""
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=8)
    sections = {"train": {"accumulate": 2}, "plan": {"mesh": {"pipe": 2}, "share": [0.7, 0.3]}}
    pool.run("run.jobs:train", 4, folder=str(tmp_path / "many"), steps=8, sections=sections)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
