"""Whole runs of stages that lie on different numbers of ranks: what one process computes, wherever it is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gossamer.view.run_directory import RunDirectory
from run.test_trainer import losses, records

ONE = {"train": {"accumulate": 6, "batch": 12}}
LAYOUTS = [[[0, 1], [2]], [[0], [1, 2]], [[0], [1, 2, 3], [4]], [[0, 2], [1, 3]]]


def spread(stages: list[list[int]], **plan: Any) -> dict[str, Any]:
    return {**ONE, "plan": {"mesh": {"pipe": len(stages)}, "stage_ranks": stages, **plan}}


def ranks_of(stages: list[list[int]]) -> int:
    return sum(map(len, stages))


def trained(pool: Any, folder: Path, stages: list[list[int]] | None = None, **more: Any) -> list[dict[str, Any]]:
    """A run in these stages, or in one process."""
    plan = more.pop("plan", {})
    sections = ONE if stages is None else spread(stages, **plan)
    for name, section in more.pop("sections", {}).items():
        sections = {**sections, name: {**sections.get(name, {}), **section}}
    ranks = 1 if stages is None else ranks_of(stages)
    return pool.run("run.jobs:train", ranks, folder=str(folder), sections=sections, **{"steps": 6, **more})


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """Where one process was trained with so much dropout."""

    @cache
    def folder(dropout: float) -> Path:
        path = tmp_path_factory.mktemp("one")
        trained(pool, path, dropout=dropout)
        return path

    return folder


def told(folder: Path) -> dict[str, list[float]]:
    """What the records of a run say of its numbers."""
    return {
        "loss": losses(folder),
        "norm": [r["grad_norm"] for r in records(folder, "step")],
        "weight": [r["weight"] for r in records(folder, "step")],
        "tokens": [r["tokens"] for r in records(folder, "step")],
        "evaluation": [r["loss"] for r in records(folder, "evaluation")],
    }


def assert_alike(many: Path, one: Path) -> None:
    for name, values in told(one).items():
        assert told(many)[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize(
    "stages",
    [pytest.param(one, marks=[pytest.mark.nightly] if one == [[0], [1, 2]] else []) for one in LAYOUTS],
    ids=str,
)
def test_numbers_are_those_of_one_process(
    pool, alone: Callable[[float], Path], tmp_path: Path, stages: list[list[int]]
) -> None:
    """Losses, norms of all gradients and evaluations; with dropout, tied weights and void labels."""
    trained(pool, tmp_path / "many", stages, dropout=0.2)
    assert_alike(tmp_path / "many", alone(0.2))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"pipeline_schedule": "gpipe"}, marks=pytest.mark.nightly),
        {"pipeline_schedule": {"split_backward": {"inner": "recompute"}}},
        {"batch_fractions": [3, 1, 1]},
        {"cuts": ["embed", "norm"]},
    ],
    ids=str,
)
def test_schedules_shares_and_cuts(pool, alone: Callable[[float], Path], tmp_path: Path, plan: dict[str, Any]) -> None:
    trained(pool, tmp_path / "many", [[0, 1], [2]], plan=plan)
    assert_alike(tmp_path / "many", alone(0.0))


def test_copies_of_a_stage_stay_bit_equal(pool, tmp_path: Path) -> None:
    """Those of its ranks, tied weights with the other stage and all."""
    first, second, third, fourth, fifth = trained(pool, tmp_path, [[0, 1], [2, 3, 4]], dropout=0.2)
    assert first["held"] == second["held"]
    assert third["held"] == fourth["held"] == fifth["held"]
    assert set(first["held"]) & set(third["held"]) == {"embed.weight"}
    assert first["held"]["embed.weight"] == third["held"]["embed.weight"]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_half_precision(pool, tmp_path: Path, precision: str) -> None:
    sections = {"train": {"precision": precision}}
    trained(pool, tmp_path / "one", sections=sections)
    trained(pool, tmp_path / "many", [[0, 1], [2]], sections=sections)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)


@pytest.mark.parametrize("stages", [pytest.param(LAYOUTS[0], marks=pytest.mark.nightly), *LAYOUTS[1:3]], ids=str)
def test_bytes_are_those_forecast(pool, tmp_path: Path, stages: list[list[int]]) -> None:
    trained(pool, tmp_path, stages, steps=3, plan={"activation_compression": {"codec": {"codec": "int8"}}})
    plan = RunDirectory(tmp_path / "run").plan()
    assert plan is not None and plan.stage_ranks == tuple(map(tuple, stages))
    mine = {link: n for link, n in plan.forecast.wire_bytes.items() if link.startswith("0>")}
    assert [step["wire_bytes"] for step in records(tmp_path, "step")] == [mine] * 3


@pytest.mark.parametrize(
    "stages", [[[0, 1], [2]], pytest.param([[0], [1, 2, 3], [4]], marks=pytest.mark.nightly)], ids=str
)
def test_stop_and_resume_is_bit_equal_to_never_stopping(pool, tmp_path: Path, stages: list[list[int]]) -> None:
    straight = trained(pool, tmp_path / "whole", stages, dropout=0.2)
    trained(pool, tmp_path / "halves", stages, dropout=0.2, until=3)
    again = trained(pool, tmp_path / "halves", stages, dropout=0.2, resume=True)
    assert [r["digest"] for r in again] == [r["digest"] for r in straight]
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole"), "every loss, to the last bit"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ([[0, 1], [2]], [[0], [1, 2, 3], [4]]),
        ([[0], [1, 2]], None),
        (None, [[0, 1], [2]]),
        pytest.param([[0], [1]], [[1], [0, 2]], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_checkpoint_is_read_in_any_layout(
    pool, alone: Callable[[float], Path], tmp_path: Path, saved: list[list[int]] | None, resumed: list[list[int]] | None
) -> None:
    trained(pool, tmp_path / "many", saved, until=3)
    (tmp_path / "many" / "run" / "plan.yaml").unlink(missing_ok=True)
    trained(pool, tmp_path / "many", resumed, resume=True)
    assert losses(tmp_path / "many") == pytest.approx(losses(alone(0.0)), rel=1e-5)


def test_a_border_goes_by_the_slowest_of_its_links(pool, tmp_path: Path) -> None:
    trained(pool, tmp_path, [[0, 1], [2]], steps=1, plan={"adapt": {"ada_topk": {"ratio": 4.0}}})
    plan = RunDirectory(tmp_path / "run").plan()
    assert plan is not None and plan.activation_compression == ({"topk": {"fraction": 0.125}},), (
        "half of an entry sent is its place"
    )
    mine = {link: n for link, n in plan.forecast.wire_bytes.items() if link.startswith("0>")}
    assert [step["wire_bytes"] for step in records(tmp_path, "step")] == [mine]


def test_a_bad_sample_moves_no_stage(pool, tmp_path: Path) -> None:
    ranks = trained(pool, tmp_path, [[0, 1], [2]], bad=11)
    assert [r["ended"] for r in ranks] == ["", "", ""]
    steps = records(tmp_path, "step")
    assert [s["committed"] for s in steps].count(False) == 1
    assert all(s["loss"] < 10 for s in steps if s["committed"])


@pytest.mark.parametrize(
    ("ranks", "plan", "said"),
    [
        (3, {"stage_ranks": [[0, 1], [1, 2]]}, "rank 1 is listed 2 times"),
        (3, {"stage_ranks": [[0, 1], [1]]}, "rank 1 is listed 2 times"),
        (4, {"stage_ranks": [[0, 1], [2]]}, "rank 3 is in no stage"),
        (3, {"stage_ranks": [[0, 1], [2, 5]]}, "there is no rank 5"),
        (3, {"stage_ranks": [[0, 1, 2], []]}, "stage 1 has no rank"),
        (3, {"stage_ranks": [[0, 1, 2]]}, "one stage is the whole model"),
        (3, {"stage_ranks": [[0, 1], [2]], "mesh": {"pipe": 3}}, "the ranks of each of 3 stages"),
        (3, {"stage_ranks": [[0, 1], [2]], "mesh": {"pipe": 2, "replica": 3}}, "leave one of the two at auto"),
        (3, {"stage_ranks": [[0, 1], [2]], "batch_fractions": [1, 1]}, "fraction for each of 3 ranks"),
        (
            3,
            {"stage_ranks": [[0, 1], [2]], "accumulate": 1},
            "at least 2 micro-batches, one for each rank of stage 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_ranks_meet(
    pool, tmp_path: Path, ranks: int, plan: dict[str, Any], said: str
) -> None:
    plan = dict(plan)
    train = {"accumulate": plan.pop("accumulate")} if "accumulate" in plan else {}
    sections = {"plan": {"mesh": {"pipe": 2}, **plan}, "train": train}
    for answer in pool.attempt("run.jobs:train", ranks, folder=str(tmp_path), sections=sections):
        assert answer["kind"] == "BadInput" and said in answer["error"], answer
        assert "run_job" not in answer["error"]
