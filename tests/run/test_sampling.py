"""What a model writes while it is trained: what `generate` says of it, wherever its stages are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run.test_trainer import records

TRAIN = {
    "optimizer": {"adamw": {"lr": 0.02}},
    "accumulate": 4,
    "evaluate_every": 3,
    "sample_prompt": "adg",
    "sample_max_new_tokens": 45,
}


def texts(pool: Any, folder: Path, ranks: int, **plan: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """A run's samples, and what its ranks said."""
    sections = {"train": TRAIN, "data": {"sequence": 40}, "plan": plan}
    said = pool.run("run.jobs:train", ranks, folder=str(folder), steps=6, kind="causal", sections=sections)
    assert [r["step"] for r in records(folder, "sample")] == [3, 6]
    assert {r["prompt"] for r in records(folder, "sample")} == {"adg"}
    return [r["text"] for r in records(folder, "sample")], said


@pytest.mark.nightly
def test_the_text_is_that_of_the_whole_model(pool, tmp_path: Path) -> None:
    """Beyond the window, too; and training is what it is without samples."""
    expected, (alone,) = texts(pool, tmp_path / "1", 1)
    assert expected[-1] == alone["text"] and len(expected[-1]) == 45 and expected[0] != expected[-1]
    silent = {"train": {k: v for k, v in TRAIN.items() if not k.startswith("sample")}, "data": {"sequence": 40}}
    (other,) = pool.run("run.jobs:train", 1, folder=str(tmp_path / "0"), steps=6, kind="causal", sections=silent)
    assert other["digest"] == alone["digest"]
    assert not records(tmp_path / "0", "sample")
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {}),
        (3, {"mesh": {"pipe": 3}}),
        (4, {"mesh": {"pipe": 2}}),
        (3, {"mesh": {"pipe": 2}, "stage_ranks": [[0, 1], [2]]}),
    ]
    for number, (ranks, plan) in enumerate(layouts):
        assert texts(pool, tmp_path / f"many {number}", ranks, **plan)[0] == expected


def test_what_cannot_be_sampled_is_told_and_training_is_what_it_is(pool, tmp_path: Path) -> None:
    """Logits of which no token can be drawn, on one rank or all; a tokenizer that fails."""
    silent = {"train": {k: v for k, v in TRAIN.items() if not k.startswith("sample")}, "data": {"sequence": 40}}
    sections = {"train": TRAIN, "data": {"sequence": 40}}
    for ranks, fault, plan, said in (
        (1, "draw", {}, "rank 0 can draw no token from the model's logits: RuntimeError"),
        (2, "draw", {}, "rank 1 can draw no token from the model's logits"),
        (2, "draw", {"mesh": {"pipe": 2}}, "rank 1 can draw no token"),
        (1, "decode", {}, "no sample: ValueError: no such letter"),
    ):
        given = {"steps": 6, "kind": "causal"}
        case = tmp_path / f"{ranks} {fault} {len(plan)}"
        arguments = {**given, "folder": str(case), "sections": {**sections, "plan": plan}, "fault": fault}
        found = pool.run("run.jobs:train_with_bad_samples", ranks, **arguments)
        arguments = {**given, "folder": str(case / "silent"), "sections": {**silent, "plan": plan}}
        expected = pool.run("run.jobs:train", ranks, **arguments)
        assert [each["digest"] for each in found] == [each["digest"] for each in expected]
        assert not records(case, "sample") and len(records(case, "step")) == 6
        assert [said in each["message"] for each in records(case, "event")] == [True, True]


def test_data_without_a_tokenizer_is_refused(pool, tmp_path: Path) -> None:
    sections = {"train": {"sample_prompt": "a"}}
    arguments = {"folder": str(tmp_path), "words": False, "kind": "causal", "sections": sections}
    (answer,) = pool.attempt("run.jobs:train", 1, **arguments)
    assert "train.sample_prompt: wanted data that is text" in answer["error"]


def test_a_model_without_logits_is_refused_at_once(pool, tmp_path: Path) -> None:
    for ranks, plan in ((1, {}), (2, {"mesh": {"pipe": 2}})):
        sections = {"train": {**TRAIN, "sample_prompt": "a"}, "plan": plan}
        folder = tmp_path / str(ranks)
        answers = pool.attempt("run.jobs:train", ranks, folder=str(folder), kind="wordless", sections=sections)
        assert all("wanted logits" in answer["error"] for answer in answers)
        assert not (folder / "run" / "records.jsonl").exists() or not records(folder, "step")
