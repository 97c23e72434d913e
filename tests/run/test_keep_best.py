"""The best checkpoint of a run stays, and a run that gets no better ends, the same in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.store.checkpoint import list_checkpoints, open_checkpoint
from run.test_trainer import records

KEEP = {"evaluate_every": 2, "keep_checkpoints": 1, "checkpoint_every": 3}
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "one process": (1, {}, "small"),
    "replicas": (2, {}, "small"),
    "stages": (2, {"plan": {"mesh": {"pipe": 2}}}, "causal"),
    "zero3": (2, {"plan": {"sharding": "zero3"}}, "causal"),
    "islands": (2, {"machines": {"islands": [[0], [1]]}, "plan": {"sync": {"diloco": {"sync_every": 3}}}}, "small"),
}


def sections(train: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**(more or {}), "train": {**KEEP, **train}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_checkpoint_stays_beside_the_newest(pool, tmp_path: Path, layout: str) -> None:
    """Losses fall here, so the highest one is looked for, to be long past at the end."""
    ranks, more, kind = LAYOUTS[layout]
    given = sections({"keep_best": {"highest": "loss"}}, more)
    pool.run("run.jobs:train", ranks, folder=str(tmp_path), steps=10, kind=kind, sections=given)
    best = max(records(tmp_path, "evaluation"), key=lambda one: one["loss"])
    assert best["step"] < 8, "or nothing is kept that would not be there anyway"
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == (10, best["step"])
    said = open_checkpoint(tmp_path / "run" / "checkpoints", 10).meta["watch"]["best"]
    assert said["step"] == best["step"] == records(tmp_path, "best")[-1]["step"]
    assert said["value"] == best["loss"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_resumed_run_knows_its_best(pool, tmp_path: Path, ranks: int) -> None:
    given = sections({"keep_best": {"highest": "loss"}})
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=10, until=5, sections=given)
    best = records(tmp_path, "best")[-1]["step"]
    assert best < 5
    pool.run("run.jobs:train", ranks, folder=str(tmp_path), steps=10, resume=True, sections=given)
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == (10, best)
    assert records(tmp_path, "best")[-1]["step"] == best, "no later evaluation was taken for a better one"


def test_a_best_that_cannot_be_saved_leaves_the_one_before(pool, tmp_path: Path) -> None:
    """Every evaluation is better than the one before; the save at step 6 fails on its disk."""
    given = sections({"keep_best": True, "checkpoint_every": 0})
    pool.run("run.keep_jobs:train_with_failing_save", 2, folder=str(tmp_path), steps=8, fails=6, sections=given)
    said = [one["message"] for one in records(tmp_path, "event") if one["level"] == "warning"]
    assert said == ["the best checkpoint, of step 6, could not be saved: that of step 4 stays"]
    assert records(tmp_path, "best")[-1]["step"] == 8
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == (8,)
    during = json.loads((tmp_path / "during").read_text())
    assert during == [[], [2], [4], [4]], "the best before stays until the new one stands"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_gets_no_better_ends_on_all_ranks(pool, tmp_path: Path, layout: str) -> None:
    ranks, more, kind = LAYOUTS[layout]
    given = sections({"early_stop": {"patience": 2, "monitor": {"highest": "loss"}}}, more)
    ended = pool.run("run.jobs:train", ranks, folder=str(tmp_path), steps=20, kind=kind, sections=given)
    assert [one["ended"] for one in ended] == [""] * ranks, "the run is done, not interrupted"
    evaluations = records(tmp_path, "evaluation")
    best = max(evaluations, key=lambda one: one["loss"])["step"]
    (end,) = records(tmp_path, "end")
    assert (end["outcome"], end["reason"], end["step"]) == ("done", "early_stop", best + 4)
    assert end["message"].startswith("early stop: 2 evaluations without a better validation loss than")
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0] == best + 4
    if layout != "stages":
        assert len({one["digest"] for one in ended}) == 1, "all ranks hold the same parameters"


def test_a_run_that_ended_early_goes_on_only_with_more_patience(pool, tmp_path: Path) -> None:
    def train(patience: int, **more: Any) -> dict[str, Any]:
        given = sections({"early_stop": {"patience": patience, "monitor": {"highest": "loss"}}})
        pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=20, sections=given, **more)
        return records(tmp_path, "end")[-1]

    first = train(2)
    again = train(2, resume=True)
    assert (again["step"], again["message"]) == (first["step"], first["message"]), "it ends where it has ended"
    assert train(3, resume=True)["step"] == first["step"] + 2, "the evaluations before count"
