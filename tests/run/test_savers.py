"""Whole runs with recompute, beside the same runs without: the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool import Pool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "zero1": (2, {"sharding": "zero1"}),
    "zero2": (2, {"sharding": "zero2"}),
    "zero3": (2, {"sharding": "zero3"}),
    "islands": (2, {"sync": {"local_sgd": {"sync_every": 2}}, "exchange": "dense"}),
    "stages": (2, {"mesh": {"pipe": 2}, "cuts": ["embed", "layers.1"]}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_recomputes_is_the_run_that_does_not(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Clipped steps, dropout, tied weights, micro-batches, rows without a label."""
    ranks, plan = LAYOUTS[layout]
    found = []
    for savers in ([], ["recompute"]):
        sections = {"plan": {"exchange": "dense", **plan, "savers": savers}, "train": {"accumulate": 2}}
        folder = str(tmp_path / str(len(found)))
        found.append(pool.run("run.jobs:train", ranks, folder=folder, steps=4, dropout=0.1, sections=sections))
    assert [one["digest"] for one in found[0]] == [one["digest"] for one in found[1]]
    assert [one["held"] for one in found[0]] == [one["held"] for one in found[1]]
    assert not any(one["ended"] for run in found for one in run)
    assert "recompute" in (tmp_path / "1" / "run" / "plan.yaml").read_text()
