"""A checkpoint of stages holds every buffer as the stage has it that changes it rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.store.checkpoint import latest_good


def test_what_the_end_of_the_forward_changes_is_saved_by_the_last_stage(pool, tmp_path: Path) -> None:
    train = {"accumulate": 4}
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=3, kind="late", sections={"train": train})
    sections = {"train": train, "plan": {"mesh": {"pipe": 2}, "cuts": [0, 2]}}
    first, last = pool.run("run.jobs:train", 2, folder=str(tmp_path / "two"), steps=3, kind="late", sections=sections)
    one, two = (latest_good(tmp_path / name / "run" / "checkpoints")[0] for name in ("one", "two"))
    assert two.read("model/count") == one.read("model/count") == 12, "micro-batches in three steps"
    for name in ("model/first", "model/seen"):
        assert one.read(name).abs().min() > 0
        torch.testing.assert_close(two.read(name), one.read(name), rtol=1e-4, atol=1e-6)
    assert last["seen"] == pytest.approx(float(two.read("model/seen")))
    assert first["seen"] != first["seen"], "elsewhere it is absent"
