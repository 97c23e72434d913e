"""Islands that train apart, as whole runs: ends, checkpoints inside a round, other numbers of islands, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.test_sync import APART, SETTINGS
from gossamer.store.checkpoint import latest_good
from pool import Pool


def sections(written: Any, **machines: Any) -> dict[str, dict[str, Any]]:
    return {"plan": {"sync": written}, "machines": machines} if machines else {"plan": {"sync": written}}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", APART)
def test_a_run_stopped_in_a_round_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    given = {"steps": 8, "dropout": 0.1, "sections": sections(SETTINGS[name])}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    assert whole[0]["digest"] == whole[1]["digest"]
    for until in (3, 5):
        folder = str(tmp_path / f"parts{until}")
        stopped = pool.run("run.jobs:train", 2, folder=folder, until=until, **given)
        assert "Interrupted" in stopped[0]["ended"]
        again = pool.run("run.jobs:train", 2, folder=folder, resume=True, **given)
        assert [one["digest"] for one in again] == [one["digest"] for one in whole]


@pytest.mark.parametrize("name", ["local_sgd", "streaming_diloco", "qsparse_local_sgd", "co2", "cser"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_islands_go_on_from_what_was_agreed(pool: Pool, tmp_path: Path, name: str, ranks: int) -> None:
    given = {"folder": str(tmp_path), "steps": 9, "sections": sections(SETTINGS[name])}
    pool.run("run.jobs:train", 2, until=5, **given)
    found = pool.run("run.jobs:train", ranks, resume=True, **given)
    assert all(one["digest"] == found[0]["digest"] and not one["ended"] for one in found)
    said = [one["message"] for one in records(tmp_path) if one["kind"] == "event"]
    assert any("start from what they had agreed on" in message for message in said)


def test_trained_together_then_apart_then_together(pool: Pool, tmp_path: Path) -> None:
    """Each time from what all agreed on: from a stop inside a round that is the anchor, and the mean of the rules'
    state, the same on all ranks.
    """
    ways = ["every_step", SETTINGS["cser"], "every_step", SETTINGS["streaming_diloco"]]
    for turn, written in enumerate(ways):
        given = {"folder": str(tmp_path), "steps": 17, "resume": turn > 0, "fresh_plan": True}
        until = {} if turn == 3 else {"until": 4 * (turn + 1) + 1}
        found = pool.run("run.jobs:train", 2, sections=sections(written), **until, **given)
        if turn != 1:  # stopped apart
            assert found[0]["digest"] == found[1]["digest"]
    steps = [one for one in records(tmp_path) if one["kind"] == "step"]
    assert [one["step"] for one in steps] == list(range(1, 18))
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_islands_of_unequal_size_and_share(pool: Pool, tmp_path: Path) -> None:
    given = sections({"diloco": {"every": 3}}, islands=[[0, 1], [2]])
    given["plan"]["share"] = [1, 1, 2]
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=7, sections=given)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    steps = [one for one in records(tmp_path) if one["kind"] == "step"]
    across = [sum(n for link, n in one["wire_bytes"].items() if link.endswith(">2")) for one in steps]
    small = 2 * 8 * (1 + 5)  # weights and votes go to everybody
    assert [n > 10 * small for n in across] == [False, False, True, False, False, True, True]


def test_tied_and_frozen_parameters_and_buffers(pool: Pool, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "steps": 6, "sections": sections({"diloco": {"every": 2, "fragments": 2}})}
    found = pool.run("run.jobs:train", 2, kind="late", frozen=["layers.1"], **given)
    assert found[0]["digest"] == found[1]["digest"]


def test_a_rejected_step_does_not_shift_the_rounds(pool: Pool, tmp_path: Path) -> None:
    given = sections({"local_sgd": {"every": 2}})
    given["train"] = {"on_nonfinite": "skip"}
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, bad=9, sections=given)
    assert found[0]["digest"] == found[1]["digest"]
    steps = [one for one in records(tmp_path) if one["kind"] == "step"]
    assert not all(one["committed"] for one in steps)
    sent = [sum(one["wire_bytes"].values()) for one in steps]
    assert [n > 1000 for n in sent] == [False, True] * 3


def test_a_period_longer_than_the_run_meets_once(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(
        "run.jobs:train", 2, folder=str(tmp_path), steps=5, sections=sections({"local_sgd": {"every": 50}})
    )
    assert found[0]["digest"] == found[1]["digest"]


ZERO_ONE = {"zero_one": {"every": 4, "start": 5, "spaced": 1, "doubles": 2}}  # rounds end after 3, 5, 6, 7, 9 steps


@pytest.mark.parametrize("kind", ["small", "halves"])
def test_zero_one_adam_stopped_anywhere_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, kind: str) -> None:
    given = {"steps": 13, "kind": kind, "sections": {**sections(ZERO_ONE), "train": {"optimizer": "zero_one_adam"}}}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    assert whole[0]["digest"] == whole[1]["digest"]
    for until in (2, 3, 4, 8, 10):
        folder = str(tmp_path / f"parts{until}")
        assert "Interrupted" in pool.run("run.jobs:train", 2, folder=folder, until=until, **given)[0]["ended"]
        again = pool.run("run.jobs:train", 2, folder=folder, resume=True, **given)
        assert [one["digest"] for one in again] == [one["digest"] for one in whole]


def test_zero_one_adam_whose_gradients_always_meet_is_adamw_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    found = []
    for name in ("adamw", "zero_one_adam"):
        given = {**sections({"zero_one": {"start": 100, "spaced": 0}}), "train": {"optimizer": {name: {"lr": 1e-2}}}}
        found += pool.run("run.jobs:train", 2, folder=str(tmp_path / name), steps=6, sections=given)
    plain = {"train": {"optimizer": {"adamw": {"lr": 1e-2}}}}
    found += pool.run("run.jobs:train", 2, folder=str(tmp_path / "plain"), steps=6, sections=plain)
    assert len({one["digest"] for one in found}) == 1


def test_a_rejected_step_leaves_all_ranks_with_the_same_second_moment(pool: Pool, tmp_path: Path) -> None:
    given = sections(ZERO_ONE) | {"train": {"optimizer": "zero_one_adam", "on_nonfinite": "skip"}}
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=9, bad=9, sections=given)
    assert not all(one["committed"] for one in records(tmp_path) if one["kind"] == "step")
    saved = latest_good(tmp_path / "run" / "checkpoints")[0]
    for name in ("optim/square/embed.weight", "optim/mean/embed.weight"):
        one, other = (saved.read(name, (0, 0), (16, 12), rank) for rank in range(2))
        assert torch.equal(one, other) and bool(one.any())


def test_half_parameters_follow_their_float32_copies(pool: Pool, tmp_path: Path) -> None:
    given = {"steps": 8, "kind": "halves", "sections": sections({"diloco": {"every": 3}})}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    assert whole[0]["digest"] == whole[1]["digest"]
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), until=4, **given)
    again = pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), resume=True, **given)
    assert again[1]["digest"] == whole[0]["digest"]


BAD: list[tuple[dict[str, Any], str]] = [
    (sections({"diloco": {"every": 0}}), "plan.sync.diloco.every: wanted a period of at least 1 step, got 0"),
    (sections({"diloco": {"every": 4, "fragments": 5}}), "plan.sync.diloco.fragments: wanted 1 to 4 fragments"),
    (sections({"diloco": {"every": 4, "delay": 4}}), "plan.sync.diloco.delay: wanted a delay of 0 to 3 steps, got 4"),
    (sections({"diloco": {"mix": 1.5}}), "plan.sync.diloco.mix: wanted a part from 0 to 1, got 1.5"),
    (sections({"local_sgd": {"start": -1}}), "plan.sync.local_sgd.start: wanted a number of steps from 0 on, got -1"),
    (sections({"diloco": {"outer": {"nesterov": {"mu": 1.0}}}}), "plan.sync.diloco.outer.nesterov.mu"),
    (sections({"zero_one": {"spaced": -1}}), "plan.sync.zero_one.spaced: wanted a number of steps from 0 on, got -1"),
    (sections({"zero_one": {"doubles": -1}}), "plan.sync.zero_one.doubles: wanted a number of steps from 0 on, got -1"),
    (
        {"plan": {"sync": "local_sgd"}, "train": {"optimizer": "zero_one_adam"}},
        "train.optimizer: wanted first steps in which all gradients meet",
    ),
    (sections({"dilocco": {}}), "no sync is called 'dilocco'"),
    ({"plan": {"sync": "diloco", "adapt": "l_greco"}}, "plan.adapt: wanted gradients that all ranks exchange"),
    ({"plan": {"sync": "diloco", "mesh": {"pipe": 2}}}, "plan.sync: wanted every process to hold the whole model"),
    (
        {"plan": {"sync": "diloco", "exchange": {"hierarchical": {"between": "dense"}}}},
        "wanted islands of ranks, got the levels all",
    ),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_input(pool: Pool, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=4, sections=given)
    assert all(one["kind"] == "BadInput" for one in answers), answers
    assert said in answers[0]["error"]
