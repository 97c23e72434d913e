"""Whole runs without a backward pass: stopped, killed, joined, gone on in another way; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pool import Pool


def sections(written: Any = "just_one_byte", **train: Any) -> dict[str, dict[str, Any]]:
    return {
        "plan": {"sync": written},
        "train": {"optimizer": {"sgd": {"lr": 0.01}}, "lr_schedule": "constant", **train},
    }


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def told(folder: Path) -> str:
    return " ".join(one["message"] for one in records(folder, "event"))


def log_of(folder: Path) -> Path:
    return folder / "run" / "checkpoints" / "bytes.log"


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Ten steps of two ranks, with checkpoints after 4, 8 and 10."""
    folder = tmp_path_factory.mktemp("whole")
    given = sections(checkpoint_every=4, keep_checkpoints=5)
    found = pool.run("run.jobs:train", 2, folder=str(folder), steps=10, kind="causal", sections=given)
    assert found[0]["digest"] == found[1]["digest"] and found[0]["seen"] == 0
    return folder, found


def copied(whole: tuple[Path, list[dict[str, Any]]], folder: Path, *steps: int) -> str:
    """The same run with no other checkpoints than these; the wanted digest."""
    shutil.copytree(whole[0], folder, dirs_exist_ok=True)
    for each in (folder / "run" / "checkpoints").glob("step-*"):
        if int(each.name.split("-")[1]) not in steps:
            shutil.rmtree(each)
    return str(whole[1][0]["digest"])


def resume(pool: Pool, ranks: int, folder: Path, **given: Any) -> list[dict[str, Any]]:
    asked = {"steps": 10, "kind": "causal", "sections": sections(), "fresh_plan": True, **given}
    return pool.run("run.jobs:train", ranks, folder=str(folder), resume=True, **asked)


def test_bytes_are_the_forecast_and_the_norm_is_of_a_gradient_s_size(
    pool: Pool, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    steps = records(whole[0], "step")
    assert [one["wire_bytes"] for one in steps] == [{"0>1": 1 + 8 + 40}] * 10
    assert "0>1: 49" in (whole[0] / "run" / "plan.yaml").read_text()
    assert records(whole[0], "start")[0]["exchange"] == "just_one_byte"
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=1, kind="causal", sections=sections("every_step"))
    mean = sum(one["grad_norm"] ** 2 for one in steps) / len(steps)
    assert 0.2 < mean / records(tmp_path, "step")[0]["grad_norm"] ** 2 < 5


@pytest.mark.parametrize("steps", [(4,), (4, 8), ()], ids=str)
def test_steps_that_a_checkpoint_missed_are_taken_again(
    pool: Pool, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]], steps: tuple[int, ...]
) -> None:
    """From an old checkpoint, or from the model that the run began with: to where the run was, bit for bit."""
    wanted = copied(whole, tmp_path, *steps)
    found = resume(pool, 2, tmp_path)
    assert [one["digest"] for one in found] == [wanted] * 2
    assert f"took steps {max(steps, default=0) + 1} to 10 again" in told(tmp_path)
    assert len(records(tmp_path, "step")) == 10, "no step was computed"


def test_who_joins_with_the_bytes_alone_is_where_the_others_are(
    pool: Pool, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Three ranks, of which no one has a checkpoint, go on from what two have done."""
    log_of(tmp_path).parent.mkdir(parents=True)
    shutil.copy(log_of(whole[0]), log_of(tmp_path))
    found = resume(pool, 3, tmp_path)
    assert [one["digest"] for one in found] == [whole[1][0]["digest"]] * 3
    more = resume(pool, 3, tmp_path, steps=12)
    assert len({one["digest"] for one in more}) == 1 and more[0]["digest"] != found[0]["digest"]
    lines = [json.loads(line[9:]) for line in log_of(tmp_path).read_text().splitlines()]
    assert [len(line["labels"]) for line in lines if line["kind"] == "step"] == [2] * 10 + [3] * 2


def test_bytes_for_another_model_are_told_of_and_not_taken(
    pool: Pool, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    log_of(tmp_path).parent.mkdir(parents=True)
    shutil.copy(log_of(whole[0]), log_of(tmp_path))
    resume(pool, 1, tmp_path, steps=2, kind="marks")
    assert "bytes.log leads on from other parameters after step 0 than these" in told(tmp_path)
    assert [one["step"] for one in records(tmp_path, "step")] == [1, 2]


def test_a_run_stopped_and_resumed_is_the_same_run(pool: Pool, tmp_path: Path) -> None:
    given = {"steps": 6, "kind": "small", "dropout": 0.3, "sections": sections({"just_one_byte": {"directions": 2}})}
    wanted = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), until=3, **given)
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), resume=True, **given)
    assert found == wanted
    assert found[0]["seen"] == 6, "of four forwards a step, the first changes the buffers"


def test_what_changed_buffers_is_not_taken_again(pool: Pool, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "kind": "small", "sections": sections(checkpoint_every=2, keep_checkpoints=9)}
    wanted = pool.run("run.jobs:train", 1, steps=6, **given)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert pool.run("run.jobs:train", 1, steps=6, resume=True, **given) == wanted
    assert "again" not in told(tmp_path) and [s["step"] for s in records(tmp_path, "step")] == [*range(1, 7), 5, 6]


def test_dropout_is_the_same_to_both_sides(pool: Pool, tmp_path: Path) -> None:
    """Else the slope would be mostly the difference between two draws, over epsilon: hundreds."""
    norms = {}
    for way in ("just_one_byte", "every_step"):
        given = {
            "folder": str(tmp_path / way),
            "steps": 4,
            "dropout": 0.5,
            "sections": sections(way, max_grad_norm=0.0),
        }
        pool.run("run.jobs:train", 1, **given)
        norms[way] = [step["grad_norm"] for step in records(tmp_path / way, "step")]
    assert max(norms["just_one_byte"]) < 5 * max(norms["every_step"])


def test_a_step_that_is_not_finite_moves_nothing_and_is_taken_again_as_such(pool: Pool, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "steps": 8, "bad": 11, "kind": "row"}
    given |= {"sections": sections(on_nonfinite="skip", checkpoint_every=1, keep_checkpoints=20)}
    first, second = pool.run("run.jobs:train", 2, **given)
    assert first["digest"] == second["digest"]
    assert [step["committed"] for step in records(tmp_path, "step")].count(False) == 1
    for each in range(1, 9):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{each:08d}")
    again = pool.run("run.jobs:train", 2, resume=True, **given)
    assert again[0]["digest"] == first["digest"] and "took steps 1 to 8 again" in told(tmp_path)


def test_behind_a_damaged_line_the_run_computes_again(
    pool: Pool, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    wanted = copied(whole, tmp_path, 4)
    lines = log_of(tmp_path).read_bytes().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if b'"step":6,' in line)
    lines[place] = lines[place].replace(b'"codes":"', b'"codes":"0')
    log_of(tmp_path).write_bytes(b"".join(lines)[:-20])  # and the last was cut short
    assert [one["digest"] for one in resume(pool, 2, tmp_path)] == [wanted] * 2
    assert "took steps 5 to 6 again" in told(tmp_path)
    assert [one["step"] for one in records(tmp_path, "step")][10:] == [7, 8, 9, 10]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000010")
    assert resume(pool, 2, tmp_path)[0]["digest"] == wanted, "what was written behind it counts"


def test_bytes_of_another_past_are_not_taken(
    pool: Pool, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    """From step 4 on the run was taken further by gradients: the old bytes lead elsewhere."""
    copied(whole, tmp_path, 4)
    by_gradients = sections("every_step", checkpoint_every=1, keep_checkpoints=5)
    there = resume(pool, 2, tmp_path, steps=6, sections=by_gradients)
    assert "again" not in told(tmp_path)
    found = resume(pool, 2, tmp_path, steps=6)
    assert found[0]["digest"] == there[0]["digest"] and "again" not in told(tmp_path)


def test_half_parameters_follow_their_float32_copies(pool: Pool, tmp_path: Path) -> None:
    given = {"steps": 6, "kind": "halves", "sections": sections({"just_one_byte": {"epsilon": 0.02}})}
    wanted = pool.run("run.jobs:train", 2, folder=str(tmp_path), **given)
    assert wanted[0]["digest"] == wanted[1]["digest"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert pool.run("run.jobs:train", 2, folder=str(tmp_path), resume=True, **given)[1]["digest"] == wanted[0]["digest"]


def test_frozen_parameters_stay(pool: Pool, tmp_path: Path) -> None:
    given = {"kind": "causal", "frozen": ["embed", "layers.0"], "sections": sections()}
    before, after = (
        pool.run("run.jobs:train", 1, folder=str(tmp_path / str(n)), steps=n, **given)[0]["held"] for n in (1, 3)
    )
    moved = {name for name, digest in after.items() if digest != before[name]}
    assert moved == {name for name in after if not name.startswith(("embed", "layers.0"))}


def asking(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    given = sections()
    return {name: {**given.get(name, {}), **changes.get(name, {})} for name in {*given, *changes}}


BAD: list[tuple[dict[str, Any], str]] = [
    (asking(train={"optimizer": "adamw"}), "train.optimizer: wanted sgd without momentum"),
    (asking(train={"optimizer": {"sgd": {"momentum": 0.9}}}), "train.optimizer: wanted sgd without momentum"),
    (asking(train={"optimizer": {"sgd": {"weight_decay": 0.1}}}), "train.optimizer: wanted sgd without momentum"),
    (asking(train={"precision": "fp16"}), "train.precision: wanted fp32 or bf16"),
    (asking(plan={"exchange": "topk"}), "plan.exchange: wanted no gradient exchange"),
    (asking(plan={"adapt": "l_greco"}), "plan.adapt: wanted plan.sync every_step, as a policy"),
    (asking(plan={"adapt": "bcrs"}), "plan.adapt: wanted plan.sync every_step, as a policy"),
    (asking(train={"verify": {"every": 2}}), "train.verify.every: wanted replicas that hold the full model"),
    (
        asking(plan={"sharding": "zero1"}),
        "plan.sharding: wanted no pipeline stages and a gradient exchange at every step",
    ),
    (asking(plan={"mesh": {"pipe": 2}}), "plan.sync: wanted no pipeline stages with"),
    (asking(plan={"sync": {"just_one_byte": {"directions": 0}}}), "plan.sync.just_one_byte.directions"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_input(pool: Pool, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=4, sections=given)
    assert all(one["kind"] == "BadInput" for one in answers), answers
    assert said in answers[0]["error"]
