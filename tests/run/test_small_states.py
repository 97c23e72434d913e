"""States in 8 bits in whole runs: checkpoints, other numbers of ranks, other rules, sharding, islands and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gossamer.optimizer.coat import Coat
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool

NAMES = ["adamw_8bit", "coat"]
IN_ISLANDS = {"zero1": {"shard_group": "island"}}
APART: dict[str, Any] = {"sync": {"diloco": {"sync_every": 2}}, "exchange": "auto"}


def run(pool: Pool, folder: Path, ranks: int, name: str, states: Any = "none", **more: Any) -> list[dict[str, Any]]:
    """Some steps of a model with matrices that are coded. `plan`, `train`, `machines`: sections of its settings."""
    given = sections(name, states, more)
    more = {"steps": 4, "kind": "wide", "values": True, "fresh_plan": True, "sections": given, **more}
    return pool.run("run.jobs:train", ranks, folder=str(folder), **more)


def attempt(pool: Pool, folder: Path, ranks: int, name: str, states: Any = "none", **more: Any) -> list[dict[str, Any]]:
    given = sections(name, states, more)
    more = {"steps": 4, "kind": "wide", "resume": True, "fresh_plan": True, "sections": given, **more}
    return pool.attempt("run.jobs:train", ranks, folder=str(folder), **more)


def sections(name: str, states: Any, more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    plan, train = more.pop("plan", {}), more.pop("train", {})
    return {
        "plan": {"sharding": states, "exchange": "dense", **plan},
        "train": {"optimizer": {name: {"lr": 3e-3}}, **train},
        "machines": more.pop("machines", {}),
    }


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = open_checkpoint(folder / "run" / "checkpoints", step)
    return {name: found.read(name) for name in found.names() if name.startswith("optim/")}


@pytest.mark.parametrize("name", NAMES)
def test_other_ranks_hold_the_same_states_bit_for_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    """1 rank, then 2, then 3, then 1: the later ones skip their steps, whose gradients are not finite."""
    run(pool, tmp_path, 1, name, "zero1", until=2)
    first = saved(tmp_path, 2)
    assert {t.dtype for t in first.values()} == {torch.uint8, torch.float32}
    skips = {"resume": True, "bads": list(range(64)), "train": {"on_nonfinite": "skip"}, "steps": 9}
    for step, ranks in ((3, 2), (4, 3), (5, 1)):
        run(pool, tmp_path, ranks, name, "zero1", until=step, **{**skips, "train": {"on_nonfinite": "skip"}})
        again = saved(tmp_path, step)
        assert again.keys() == first.keys() and all(torch.equal(again[one], first[one]) for one in first)


@pytest.mark.parametrize("name", [pytest.param("adamw_8bit", marks=pytest.mark.nightly), "coat"])
def test_a_stopped_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    whole = run(pool, tmp_path / "whole", 2, name, "zero2")
    run(pool, tmp_path / "parts", 2, name, "zero2", until=2)
    again = run(pool, tmp_path / "parts", 2, name, "zero2", resume=True)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


@pytest.mark.parametrize(("name", "states"), [("adamw_8bit", "zero3"), ("coat", "zero1")])
def test_sharded_states_are_those_of_one_rank(pool: Pool, tmp_path: Path, name: str, states: str) -> None:
    """Gradients are summed in another order: a few codes differ by one, and those numbers by a part of a step."""
    plain = run(pool, tmp_path / "plain", 1, name)
    ours = run(pool, tmp_path / "ours", 2, name, states)
    assert ours[0]["digest"] == ours[1]["digest"]
    found, wanted = (torch.tensor(one[0]["values"]) for one in (ours, plain))
    off = (found - wanted).abs()
    assert float(off.mean()) < 3e-5 and float(off.max()) < 4 * 3e-3


@pytest.mark.parametrize(
    ("before", "after", "states"),
    [
        ("adamw", "coat", "none"),
        ("coat", "adamw", "zero1"),
        ("adamw_8bit", "coat", "zero1"),
        pytest.param("adamw", "coat", "zero1", marks=pytest.mark.nightly),
        pytest.param("coat", "adamw", "none", marks=pytest.mark.nightly),
        pytest.param("adamw_8bit", "coat", "none", marks=pytest.mark.nightly),
    ],
)
def test_states_of_another_rule_are_refused(pool: Pool, tmp_path: Path, before: str, after: str, states: str) -> None:
    run(pool, tmp_path, 1, before, until=2)
    answer = attempt(pool, tmp_path, 1, after, states)[0]
    assert answer["kind"] == "BadInput", answer["error"]
    assert f"another optimizer: this run's is {after}, the saved one {before}." in answer["error"]


@pytest.mark.nightly
def test_islands_keep_states_of_their_own(pool: Pool, tmp_path: Path) -> None:
    islands = {"islands": [[0, 1], [2, 3]]}
    given = {"plan": APART, "machines": islands, "steps": 6}
    whole = run(pool, tmp_path / "whole", 4, "coat", IN_ISLANDS, **given)
    run(pool, tmp_path / "parts", 4, "coat", IN_ISLANDS, until=3, **given)
    again = run(pool, tmp_path / "parts", 4, "coat", IN_ISLANDS, resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]
    run(pool, tmp_path / "once", 4, "coat", IN_ISLANDS, until=3, **given)
    answer = attempt(pool, tmp_path / "once", 2, "coat", steps=6)[0]
    assert "in a code of 8 bits, which cannot be averaged" in answer["error"]


def moments(states: dict[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    """Both of a matrix, decoded."""
    slots = {one.split("/")[1]: t for one, t in states.items() if one.endswith(f"/{name}")}
    return [Coat()._decoded(slots, moment, torch.zeros(192, 192)) for moment in ("mean", "square")]


def test_stages_with_tied_weights(pool: Pool, tmp_path: Path) -> None:
    plain = run(pool, tmp_path / "plain", 1, "coat")
    ours = run(pool, tmp_path / "ours", 2, "coat", plan={"mesh": {"pipe": 2}}, values=False)
    assert all(one["ended"] == "" for one in ours) and plain[0]["ended"] == ""
    states, wanted = saved(tmp_path / "ours", 4), saved(tmp_path / "plain", 4)
    assert states.keys() == wanted.keys()
    assert all(states[one].shape == wanted[one].shape and states[one].dtype == wanted[one].dtype for one in wanted)
    for layer in range(6):
        ours_, plains = (moments(one, f"layers.{layer}.weight") for one in (states, wanted))
        assert all(float((a - b).norm()) < 0.05 * float(b.norm()) for a, b in zip(ours_, plains, strict=True))


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("adamw_8bit", "zero1"),
        ("coat", "none"),
        ("coat", "zero3"),
        pytest.param("adamw_8bit", "none", marks=pytest.mark.nightly),
        pytest.param("adamw_8bit", "zero3", marks=pytest.mark.nightly),
        pytest.param("coat", "zero1", marks=pytest.mark.nightly),
    ],
)
def test_the_plan_knows_the_bytes(pool: Pool, tmp_path: Path, name: str, states: str) -> None:
    """Those of the tensors in the checkpoint, beside parameters and gradients."""
    run(pool, tmp_path, 2, name, states)
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    kept = sum(t.nbytes for t in saved(tmp_path, 4).values())
    numel = 16 * 192 + 6 * (192 * 192 + 192)
    copies = {"none": 2 * kept + 2 * 8 * numel, "zero1": kept + 2 * 8 * numel, "zero3": kept + 8 * numel}
    assert sum(plan["forecast"]["state_bytes"]) == pytest.approx(copies[states], rel=0.005)
