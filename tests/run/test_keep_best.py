"""The best checkpoint of a run stays, and a run that gets no better ends, the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.store.checkpoint import list_checkpoints, open_checkpoint
from run.test_trainer import records

RATES = {"small": 3.0, "causal": 60.0}  # so large that the losses rise again
KEEP = {"evaluate_every": 2, "keep_checkpoints": 1, "checkpoint_every": 3}
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "one process": (1, {}, "small"),
    "replicas": (2, {}, "small"),
    "stages": (2, {"plan": {"mesh": {"pipe": 2}}}, "causal"),
    "zero3": (2, {"plan": {"sharding": "zero3"}}, "causal"),
    "islands": (2, {"machines": {"islands": [[0], [1]]}, "plan": {"sync": {"diloco": {"sync_every": 2}}}}, "small"),
}


def sections(train: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**(more or {}), "train": {**KEEP, **train}}


def best_of(folder: Path) -> int:
    found = records(folder, "evaluation")
    return min(found, key=lambda one: one["loss"])["step"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_checkpoint_stays_beside_the_newest(pool, tmp_path: Path, layout: str) -> None:
    """The learning rate is so large that the first evaluations are the best."""
    ranks, more, kind = LAYOUTS[layout]
    given = sections({"keep_best": True, "optimizer": {"sgd": {"lr": RATES[kind]}}, "max_grad_norm": 0}, more)
    pool.run("run.jobs:train", ranks, folder=str(tmp_path), steps=10, kind=kind, sections=given)
    best = best_of(tmp_path)
    assert best < 10, "or nothing is kept that would not be there anyway"
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == (10, best)
    said = open_checkpoint(tmp_path / "run" / "checkpoints", 10).meta["watch"]["best"]
    assert said["step"] == best == records(tmp_path, "best")[-1]["step"]
    assert said["value"] == min(one["loss"] for one in records(tmp_path, "evaluation"))
