"""Whole runs: exact resume, exact gradients on any number of ranks, nothing moved by a step that is not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.data.ordering import order
from gossamer.store.checkpoint import open_checkpoint


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in records(folder, "step")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_stop_and_resume_is_bit_equal_to_never_stopping(pool, tmp_path: Path, ranks: int) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    (straight, *_) = pool.run("run.jobs:train", ranks, folder=str(whole), steps=8, dropout=0.2)
    (first, *_) = pool.run("run.jobs:train", ranks, folder=str(halves), steps=8, until=4, dropout=0.2)
    assert first["ended"].startswith("Interrupted: stopped as asked after step 4")
    assert first["digest"] != straight["digest"]
    (second, *_) = pool.run("run.jobs:train", ranks, folder=str(halves), steps=8, resume=True, dropout=0.2)
    assert second["digest"] == straight["digest"]
    assert losses(halves) == losses(whole), "every loss, to the last bit"
    assert second["seen"] == straight["seen"], "buffers are state too"


def test_a_stop_after_a_rejected_step_is_bit_equal_too(pool, tmp_path: Path) -> None:
    """In fp16: the number of updates, which is not that of steps, and the scale of the loss are state as well."""
    given = {"steps": 6, "bad": int(order(0, 64)(9)), "sections": {"train": {"precision": "fp16"}}}
    (straight,) = pool.run("run.jobs:train", 1, folder=str(tmp_path / "whole"), **given)
    assert [s["committed"] for s in records(tmp_path / "whole", "step")] == [True, False, True, True, True, True]
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "halves"), until=4, **given)
    (again,) = pool.run("run.jobs:train", 1, folder=str(tmp_path / "halves"), resume=True, **given)
    assert again["digest"] == straight["digest"] and losses(tmp_path / "halves")[4:] == losses(tmp_path / "whole")[4:]
    ends = [open_checkpoint(tmp_path / name / "run" / "checkpoints", 6) for name in ("whole", "halves")]
    assert [int(one.read("precision/good_steps")) for one in ends] == [4, 4]


def test_every_sample_is_seen_once_whatever_the_number_of_ranks(pool, tmp_path: Path) -> None:
    for ranks in (1, 3):
        pool.run("run.jobs:train", ranks, folder=str(tmp_path / str(ranks)), steps=4)
        ledger = [tuple(r["samples"]) for r in records(tmp_path / str(ranks), "step")]
        assert ledger == [(0, 8), (8, 16), (16, 24), (24, 32)]


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(2, {}), (2, {"batch_fractions": [0.75, 0.25]}), (3, {"batch_fractions": [1, 2, 5]}), (4, {})],
)
def test_losses_are_those_of_one_process(pool, tmp_path: Path, ranks: int, plan: dict) -> None:
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=8)
    pool.run("run.jobs:train", ranks, folder=str(tmp_path / "many"), steps=8, sections={"plan": plan})
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    evaluations = [records(tmp_path / name, "evaluation")[-1]["loss"] for name in ("one", "many")]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)


def test_accumulation_does_not_change_the_gradient(pool, tmp_path: Path) -> None:
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=8)
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "four"), steps=8, sections={"train": {"accumulate": 4}})
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_dropout_does_not_depend_on_the_number_of_ranks(pool, tmp_path: Path) -> None:
    """Same micro-batches (two rows each), dealt to one rank and to four."""
    one = {"train": {"accumulate": 4}}
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=6, dropout=0.5, sections=one)
    pool.run("run.jobs:train", 4, folder=str(tmp_path / "four"), steps=6, dropout=0.5)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "none"), steps=6)
    assert losses(tmp_path / "none") != pytest.approx(losses(tmp_path / "one"), rel=1e-3), "dropout was on"


def test_resume_on_another_number_of_ranks_is_equal_within_tolerance(pool, tmp_path: Path) -> None:
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=8)
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "many"), steps=8, until=4)
    pool.run("run.jobs:train", 3, folder=str(tmp_path / "many"), steps=8, resume=True)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_sample_that_is_not_finite_moves_nothing(pool, tmp_path: Path) -> None:
    """The bad sample's step is tried twice, rejected on both ranks, counted, and the run goes on without it."""
    first, second = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=8, bad=11)
    assert first["digest"] == second["digest"] and first["ended"] == ""
    steps = records(tmp_path, "step")
    assert [s["committed"] for s in steps].count(False) == 1
    warnings = [e["message"] for e in records(tmp_path, "event")]
    assert any("tried again" in w for w in warnings) and any("no parameter moved" in w for w in warnings)
    assert records(tmp_path, "evaluation")[-1]["loss"] > 0


def test_stop_policy_stops_and_says_why(pool, tmp_path: Path) -> None:
    policy = {"train": {"on_nonfinite": "stop"}}
    ended = [r["ended"] for r in pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=8, bad=11, sections=policy)]
    assert all(e.startswith("StepRejected: step ") and "are not finite on rank" in e for e in ended)
    assert records(tmp_path, "end")[-1]["outcome"] == "failed"


def test_metered_bytes_are_the_forecast(pool, tmp_path: Path) -> None:
    import yaml

    pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=3)
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    forecast = {k: v for k, v in plan["forecast"]["wire_bytes"].items() if k.startswith("0>")}
    assert forecast
    for step in records(tmp_path, "step"):
        assert step["wire_bytes"] == forecast


@pytest.mark.parametrize("precision", ["bf16"])
def test_lower_precision_learns_the_same(pool, tmp_path: Path, precision: str) -> None:
    lower = {"train": {"precision": precision}}
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "fp32"), steps=30)
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "low"), steps=30, sections=lower)
    assert losses(tmp_path / "low")[-1] == pytest.approx(losses(tmp_path / "fp32")[-1], rel=0.05)
    assert losses(tmp_path / "low") != losses(tmp_path / "fp32")
