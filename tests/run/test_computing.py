"""What is left to the machine: the type that is computed in, and how many steps a time is enough for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gossamer.model.model_profile import matmul_seconds
from gossamer.model.precision import BF16, FP32
from gossamer.run import auto_precision
from gossamer.view.summary import summarize
from model.habits import Net
from run.test_untouched import parts_of, run_alone


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]
    return [one for one in found if one["kind"] == kind]


@pytest.mark.parametrize(("measured", "chosen"), [((1.0, 0.5), "bf16"), ((1.0, 0.95), "fp32"), ((0.2, 1.0), "fp32")])
def test_bf16_is_taken_where_it_is_measured_to_be_faster(
    tmp_path: Path, measured: tuple[float, float], chosen: str
) -> None:
    with patch.object(auto_precision, "matmul_seconds", lambda *_: measured):
        directory = run_alone(parts_of(Net(), precision="auto"), tmp_path)
    plan = directory.plan()
    assert plan is not None and plan.reasons["precision"].startswith(f"{chosen}: matmuls of this model's shapes")
    assert [one["precision"] for one in told(tmp_path, "start")] == [chosen]
    (said,) = [one["message"] for one in told(tmp_path, "event") if one["message"].startswith("precision: ")]
    assert said == f"precision: {plan.reasons['precision']}"
    with patch.object(auto_precision, "matmul_seconds", lambda *_: measured[::-1]):
        run_alone(parts_of(Net(), precision="auto", steps=5), tmp_path, resume=True)
    assert [one["precision"] for one in told(tmp_path, "start")] == [chosen, chosen], "the first choice is kept"


def test_the_slowest_rank_decides(pool: Any, tmp_path: Path) -> None:
    found = pool.run("run.jobs:computing", 2, measured=[[1.0, 0.5], [1.5, 2.0]])
    assert [one[0] for one in found] == ["fp32", "fp32"] and found[0] == found[1]


def test_both_are_measured() -> None:
    fp32_s, bf16_s = matmul_seconds([(16, 8), (16, 8), (3000, 4)], 64, (FP32, BF16), torch.device("cpu"))
    assert fp32_s > 0 and bf16_s > 0


def test_steps_fit_into_a_time(tmp_path: Path) -> None:
    """Time that is over after ten steps: the run ends there, whole. Much time changes nothing."""
    run_alone(parts_of(Net(), steps=60, seconds=1e-6), tmp_path / "short")
    assert [(one["step"], one["steps"]) for one in told(tmp_path / "short", "length")] == [(10, 10)]
    assert [one["outcome"] for one in told(tmp_path / "short", "end")] == ["done"]
    assert [one["step"] for one in told(tmp_path / "short", "checkpoint")] == [10]
    run_alone(parts_of(Net(), steps=12, seconds=1e6), tmp_path / "long")
    assert len(told(tmp_path / "long", "step")) == 12 and not told(tmp_path / "long", "length")


def test_the_schedule_is_of_the_steps_that_are_made(tmp_path: Path) -> None:
    """A clock that goes one second per look: the rate falls to its floor in the last step."""
    with patch("gossamer.run.trainer.time.perf_counter", iter(range(10**6)).__next__):
        directory = run_alone(
            parts_of(Net(), steps=400, seconds=600.0, lr_schedule={"cosine": {"warmup": 0, "min_lr_factor": 0.1}}),
            tmp_path,
        )
    steps = told(tmp_path, "step")
    assert 20 < len(steps) < 200 and summarize(directory)["steps_wanted"] == len(steps)
    assert steps[-1]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 * (1 + math.cos(math.pi * (1 - 1 / len(steps)))) / 2))
