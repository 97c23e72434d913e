"""Whole runs of a model in stages over gloo: the losses, gradients and bytes of one process, whatever the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from run.test_trainer import losses, records

STAGES = {"train": {"accumulate": 4}}


def staged(stages: int, **plan: Any) -> dict[str, Any]:
    return {"train": {"accumulate": 4}, "plan": {"mesh": {"pipe": stages}, **plan}}


@pytest.mark.parametrize(
    ("ranks", "stages", "plan"),
    [
        (2, 2, {}),
        (3, 3, {}),
        (2, 2, {"pipeline_schedule": "gpipe"}),
        (3, 3, {"pipeline_schedule": {"split_backward": {"inner": "one_f_one_b"}}}),
        pytest.param(
            *(3, 3, {"pipeline_schedule": {"recompute": {"split_backward": {"inner": "gpipe"}}}}),
            marks=pytest.mark.nightly,
        ),
        (2, 2, {"pipeline_schedule": "recompute"}),
        pytest.param(1, 1, {"pipeline_schedule": "recompute"}, marks=pytest.mark.nightly),
        pytest.param(4, 4, {"cuts": ["embed", "layers.0", "layers.1", "norm"]}, marks=pytest.mark.nightly),
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


def test_units_that_the_user_names(pool, tmp_path: Path) -> None:
    """Parts of a child, called in a row with dropout between them: keyed alike in one process and in stages."""
    named = {"units": ["body.first", "body.second", "body.third"]}
    arguments = {"steps": 6, "dropout": 0.3, "kind": "row"}
    one = {"train": {"accumulate": 4}, "plan": named}
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "1"), sections=one, **arguments)
    for stages, cuts in ((2, ["embed", "body.second"]), (3, ["embed", "body.second", "body.third"])):
        folder = tmp_path / str(stages)
        pool.run("run.jobs:train", stages, folder=str(folder), sections=staged(stages, cuts=cuts, **named), **arguments)
        assert losses(folder) == pytest.approx(losses(tmp_path / "1"), rel=1e-6)
        plan = yaml.safe_load((folder / "run" / "plan.yaml").read_text())
        assert plan["units"] == ["embed", "body.first", "body.second", "body.third", "head"]
    found = {"train": {"accumulate": 4}}
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "found"), sections=found, **arguments)
    assert losses(tmp_path / "found") != pytest.approx(losses(tmp_path / "1"), rel=1e-6), "other units, other numbers"


def test_replicas_of_stages(pool, tmp_path: Path) -> None:
    """Two unequal replicas of two stages, tied weights and all."""
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=8)
    sections = {"train": {"accumulate": 2}, "plan": {"mesh": {"pipe": 2}, "batch_fractions": [0.7, 0.3]}}
    pool.run("run.jobs:train", 4, folder=str(tmp_path / "many"), steps=8, sections=sections)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_checkpoint_of_stages_is_read_in_any_layout(pool, tmp_path: Path) -> None:
    """Two stages save after step 4; two stages, one process, three stages and two replicas of two go on from it."""
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=8, sections=STAGES)
    expected = losses(tmp_path / "one")
    for ranks, stages in ((2, 2), (1, 1), (3, 3), (4, 2)):
        folder = str(tmp_path / f"{ranks}x{stages}")
        pool.run("run.jobs:train", 2, folder=folder, steps=8, until=4, sections=staged(2))
        (Path(folder) / "run" / "plan.yaml").unlink(missing_ok=True)
        sections = {"train": {"accumulate": 2}, "plan": {"mesh": {"pipe": stages}}}
        (first, *_) = pool.run("run.jobs:train", ranks, folder=folder, steps=8, resume=True, sections=sections)
        assert first["ended"] == ""
        assert losses(Path(folder)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", ["one_f_one_b", {"recompute": {"split_backward": {"inner": "gpipe"}}}])
def test_a_quantized_base_in_stages_is_that_of_one_process_and_resumes_as_one(pool, tmp_path: Path, schedule) -> None:
    one, two, kind = tmp_path / "one", tmp_path / "two", {"kind": "quantized", "dropout": 0.2, "steps": 8}
    pool.run("run.jobs:train", 1, folder=str(one), sections=STAGES, **kind)
    sections = staged(2, pipeline_schedule=schedule)
    pool.run("run.jobs:train", 2, folder=str(two), until=4, sections=sections, **kind)
    (two / "run" / "plan.yaml").unlink()
    pool.run("run.jobs:train", 1, folder=str(two), resume=True, sections=STAGES, **kind)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


def test_stop_and_resume_is_bit_equal_to_never_stopping(pool, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    straight = pool.run("run.jobs:train", 3, folder=str(whole), steps=8, dropout=0.2, sections=staged(3))
    pool.run("run.jobs:train", 3, folder=str(halves), steps=8, until=4, dropout=0.2, sections=staged(3))
    again = pool.run("run.jobs:train", 3, folder=str(halves), steps=8, resume=True, dropout=0.2, sections=staged(3))
    assert [r["digest"] for r in again] == [r["digest"] for r in straight]
    assert losses(halves) == losses(whole), "every loss, to the last bit"


def test_bytes_are_those_forecast(pool, tmp_path: Path) -> None:
    """In every step and on every link, with tied weights, unequal micro-batches and a boundary in int8."""
    from gossamer.spec.plan import Plan
    from gossamer.view.run_directory import RunDirectory

    sections = staged(2, activation_compression={"codec": {"codec": "int8"}})
    sections["train"] = {"accumulate": 3}
    pool.run("run.jobs:train", 4, folder=str(tmp_path), steps=3, sections=sections)
    plan = RunDirectory(tmp_path / "run").plan()
    assert isinstance(plan, Plan)
    mine = {link: n for link, n in plan.forecast.wire_bytes.items() if link.startswith("0>")}
    for step in records(tmp_path, "step"):
        assert step["wire_bytes"] == mine


def test_a_bad_sample_moves_no_stage(pool, tmp_path: Path) -> None:
    ranks = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=8, bad=11, sections=staged(2))
    assert [r["ended"] for r in ranks] == ["", ""]
    steps = records(tmp_path, "step")
    assert [s["committed"] for s in steps].count(False) == 1
    assert all(s["loss"] < 10 for s in steps if s["committed"])


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.nightly), "fp16"])
def test_half_precision(pool, tmp_path: Path, precision: str) -> None:
    """Boundary tensors are what autocast makes of them; the same micro-batches as one process."""
    for ranks, stages in ((1, 1), (3, 3)):
        sections = staged(stages)
        sections["train"] = {"accumulate": 4, "precision": precision}
        pool.run("run.jobs:train", ranks, folder=str(tmp_path / str(ranks)), steps=6, sections=sections)
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "1"), rel=2e-3)


def test_evaluation_and_gradients_of_frozen_parts(pool, tmp_path: Path) -> None:
    """A stage without anything to train passes gradients on."""
    for ranks, stages in ((1, 1), (3, 3)):
        arguments = {"steps": 6, "sections": staged(stages, cuts="auto"), "frozen": ["layers.0"]}
        pool.run("run.jobs:train", ranks, folder=str(tmp_path / str(ranks)), **arguments)
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "plan", "kind", "said"),
    [
        (3, {"mesh": {"pipe": 2}}, "BadInput", "a multiple of 2 processes"),
        (5, {"mesh": {"pipe": 5}}, "SplitError", "at least 5 units for 5 stages"),
        (2, {"mesh": {"pipe": 2}, "cuts": ["embed", "layers.7"]}, "SplitError", "there is no unit 'layers.7'"),
        (2, {"mesh": {"pipe": 2}, "units": ["layers.7"]}, "BadInput", "there is no module 'layers.7'"),
        (1, {"units": ["layers"]}, "BadInput", "which has no forward"),
        (2, {"mesh": {"pipe": 2}, "cuts": [0, 9]}, "SplitError", "the number of a block, 0 to 1"),
        (2, {"mesh": {"pipe": 2}, "cuts": [0]}, "SplitError", "the first unit of each of 2 stages"),
        (2, {"mesh": {"pipe": 2}, "accumulate": 9}, "BadInput", "9 micro-batches on every replica"),
        (2, {"mesh": {"pipe": 2}, "pipeline_schedule": "single_stage"}, "BadInput", "1 stage on 1 rank"),
        (
            2,
            {"mesh": {"pipe": 2}, "activation_compression": ["none", "none"]},
            "BadInput",
            "one method for each of the 1 boundaries",
        ),
        (
            2,
            {"mesh": {"pipe": 2}, "activation_compression": "int8"},
            "BadInput",
            "no activation codec is called 'int8'",
        ),
        (2, {"mesh": {"pipe": 2}, "adapt": "l_greco"}, "BadInput", "a policy for the links between stages"),
    ],
)
def test_what_cannot_be_is_refused_before_the_ranks_meet(
    pool, tmp_path: Path, ranks: int, plan: dict[str, Any], kind: str, said: str
) -> None:
    plan = dict(plan)
    train = {"accumulate": plan.pop("accumulate")} if "accumulate" in plan else {}
    for answer in pool.attempt("run.jobs:train", ranks, folder=str(tmp_path), sections={"plan": plan, "train": train}):
        assert answer["kind"] == kind and said in answer["error"], answer
        assert "run_job" not in answer["error"]


def test_each_border_has_its_own_way_by_its_link(pool, tmp_path: Path) -> None:
    """AdaTopK: the link that takes longest for what crosses it sends 1/ratio of the bytes; the plan says so."""
    from gossamer.view.run_directory import RunDirectory

    sections = staged(3, adapt={"ada_topk": {"ratio": 4.0}})
    pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=2, sections=sections)
    plan = RunDirectory(tmp_path / "run").plan()
    assert plan is not None and isinstance(plan.activation_compression, tuple) and len(plan.activation_compression) == 2
    fractions = [way["topk"]["fraction"] for way in plan.activation_compression if isinstance(way, dict)]
    assert min(fractions) == pytest.approx(1 / 8), "half of an entry sent is its place"
    mine = {link: n for link, n in plan.forecast.wire_bytes.items() if link.startswith("0>")}
    assert [step["wire_bytes"] for step in records(tmp_path, "step")] == [mine, mine]
