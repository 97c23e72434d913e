"""Model states in tiers, as whole runs: what plain training computes, bit for bit, with the states in a file."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from gossamer.sharding import read_tiers
from gossamer.store.checkpoint import list_checkpoints, open_checkpoint
from pool import Pool
from run.by_day import combined

DIVIDED = {"shard_group": "all"}
OF_TORCH = {"from_class": {"path": "torch.optim:Adam"}}
LIMITS = {"device": "64MB", "host": "64MB", "file": "64MB"}


def sections(folder: Path, *, clip: float, tiers: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    limits = {**LIMITS, "directory": str(folder / "tiers"), **(tiers or {})}
    return {"plan": {"sharding": {"tiers": limits}}, "train": {"max_grad_norm": clip, **train}}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def saved(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the newest checkpoint."""
    there = folder / "run" / "checkpoints"
    found = open_checkpoint(there, max(list_checkpoints(there)))
    return {name: found.read(name) for name in found.names() if not name.startswith("rng/")}


def same(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, one in plain.items():
        assert one.dtype == ours[name].dtype
        assert torch.equal(ours[name], one), name


@pytest.mark.parametrize(
    ("kind", "clip"),
    combined(
        ["small", "habits", "branches", "thin", "halves", "sometimes"],
        [0.0, 0.5],
        by_day=[("small", 0.5), ("habits", 0.5), ("branches", 0.0), ("thin", 0.0), ("halves", 0.5), ("sometimes", 0.0)],
    ),
)
def test_it_is_plain_training(pool: Pool, tmp_path: Path, kind: str, clip: float) -> None:
    """Weights, losses, norms and optimizer states: clipped or not, tied weights, unused ones, 0-dim ones, half types,
    recomputed blocks, another order of the units in a later step.
    """
    given = {"steps": 5, "kind": kind, "dropout": 0.1}
    ours = pool.run("run.jobs:train", 1, folder=str(tmp_path / "a"), sections=sections(tmp_path, clip=clip), **given)
    asked = {"train": {"max_grad_norm": clip}}
    plain = pool.run("run.jobs:train", 1, folder=str(tmp_path / "b"), sections=asked, **given)
    assert ours[0]["digest"] == plain[0]["digest"]
    steps = [[(one["loss"], one["grad_norm"]) for one in records(tmp_path / side, "step")] for side in "ab"]
    assert steps[0] == steps[1]
    same(saved(tmp_path / "a"), saved(tmp_path / "b"))
    assert list((tmp_path / "tiers").iterdir()) == []  # the file goes with the run


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_rejected_steps_evaluations_and_micro_batches(pool: Pool, tmp_path: Path, clip: float) -> None:
    """A step that is skipped moves nothing, though some of its updates were written."""
    more = {"batch": 8, "accumulate": 2, "evaluate_every": 2, "on_nonfinite": "skip"}
    given = {"steps": 6, "bad": 17}
    ours, plain = (
        pool.run("run.jobs:train", 1, folder=str(tmp_path / side), sections=asked, **given)[0]
        for side, asked in (
            ("a", sections(tmp_path, clip=clip, **more)),
            ("b", {"train": {"max_grad_norm": clip, **more}}),
        )
    )
    assert ours["digest"] == plain["digest"]
    said = [[one["message"] for one in records(tmp_path / side, "event")] for side in "ab"]
    rejected = [[one for one in each if "no parameter moved" in one] for each in said]
    assert rejected[0] == rejected[1] != []
    losses = [[one["loss"] for one in records(tmp_path / side, "evaluation")] for side in "ab"]
    assert losses[0] == losses[1] != []
    same(saved(tmp_path / "a"), saved(tmp_path / "b"))


def test_a_stopped_run_goes_on_with_tiers_and_without(pool: Pool, tmp_path: Path) -> None:
    tiered, plain = sections(tmp_path, clip=0.0), {"train": {"max_grad_norm": 0.0}}
    whole = pool.run("run.jobs:train", 1, folder=str(tmp_path / "whole"), sections=plain, steps=6)[0]["digest"]
    for first, second in ((tiered, tiered), (tiered, plain), (plain, tiered)):
        folder = tmp_path / f"{first is tiered}{second is tiered}"
        pool.run("run.jobs:train", 1, folder=str(folder), sections=first, steps=6, until=3)
        given = {"folder": str(folder), "sections": second, "steps": 6, "resume": True, "fresh_plan": True}
        assert pool.run("run.jobs:train", 1, **given)[0]["digest"] == whole


def test_what_a_step_moves_and_at_which_rate_is_said_before(pool: Pool, tmp_path: Path) -> None:
    for clip, hidden in ((0.0, False), (0.5, True)):
        folder = tmp_path / str(clip)
        pool.run("run.jobs:train", 1, folder=str(folder), sections=sections(folder, clip=clip), steps=1)
        said = [one["message"] for one in records(folder, "event") if one["message"].startswith("tiers: ")]
        assert "as measured" in said[0]
        assert any("nothing of them is hidden" in one for one in said) is hidden


@pytest.mark.parametrize(("kind", "precision"), [("small", "fp32"), ("small", "bf16"), ("sometimes", "fp32")])
def test_tiles_of_layers_are_the_same_from_the_file(pool: Pool, tmp_path: Path, kind: str, precision: str) -> None:
    """Clipped, micro-batches, tied weights, and weights that only a later step reads: bit-equal to tiles in memory.

    Evaluation has tiles with tiers alone, and the same losses up to rounding.
    """
    saving = {"savers": [{"tiling": {"linears": "*", "tiles": 3}}]}
    more = {"batch": 8, "accumulate": 2, "evaluate_every": 2, "precision": precision}
    ours = sections(tmp_path, clip=0.5, **more)
    ours["plan"] |= saving
    given = {"steps": 5, "kind": kind, "dropout": 0.1}
    ours = pool.run("run.jobs:train", 1, folder=str(tmp_path / "a"), sections=ours, **given)
    asked = {"plan": saving, "train": {"max_grad_norm": 0.5, **more}}
    other = pool.run("run.jobs:train", 1, folder=str(tmp_path / "b"), sections=asked, **given)
    assert ours[0]["digest"] == other[0]["digest"] and not ours[0]["ended"]
    same(saved(tmp_path / "a"), saved(tmp_path / "b"))
    losses = [[one["loss"] for one in records(tmp_path / side, "evaluation")] for side in "ab"]
    assert len(losses[0]) >= 2 and losses[0] == pytest.approx(losses[1], rel=1e-5 if precision == "fp32" else 1e-2)


def pointed(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # of a process that has just ended
        return ""


def beside_plain(
    pool: Pool, folder: Path, ranks: int, *, clip: float, train: dict[str, Any] | None = None, **given: Any
) -> None:
    """Losses, norms, weights, states and rejected steps are those of plain training on as many ranks."""
    plan, more, keys = given.pop("plan", {}), dict(train or {}), given.pop("tiers", {})
    tiered = sections(folder, clip=clip, tiers=keys, **more)
    tiered["plan"] |= plan
    plain = {"train": {"max_grad_norm": clip, **more}, "plan": {"exchange": "dense", **plan}}
    ours, others = (
        pool.run("run.jobs:train", ranks, folder=str(folder / side), sections=asked, **given)
        for side, asked in (("a", tiered), ("b", plain))
    )
    assert {one["digest"] for one in ours} == {one["digest"] for one in others}
    assert {one["ended"] for one in ours} == {""}
    for kind, fields in (("step", ("loss", "grad_norm")), ("evaluation", ("loss",))):
        one, other = ([[got[name] for name in fields] for got in records(folder / side, kind)] for side in "ab")
        assert one == other
    said = [[one["message"] for one in records(folder / side, "event")] for side in "ab"]
    rejected = [[one for one in each if "no parameter moved" in one] for each in said]
    assert rejected[0] == rejected[1] and bool(rejected[0]) == ("bad" in given)
    same(saved(folder / "a"), saved(folder / "b"))
    assert list((folder / "tiers").iterdir()) == []


@pytest.mark.parametrize(
    ("ranks", "kind", "clip"),
    combined([2, 3], ["gpt2", "llama", "thin"], [0.0, 0.5], by_day=[(2, "gpt2", 0.5), (3, "thin", 0.0)]),
)
def test_ranks_that_divide_states_are_plain_training_on_as_many(
    pool: Pool, tmp_path: Path, ranks: int, kind: str, clip: float
) -> None:
    """Parameters too of fewer rows than there are ranks."""
    beside_plain(pool, tmp_path, ranks, kind=kind, clip=clip, steps=4, tiers=DIVIDED)


@pytest.mark.parametrize(
    ("ranks", "kind", "clip"),
    combined(
        [2, 3],
        ["gpt2", "llama", "branches", "sometimes"],
        [0.0, 0.5],
        by_day=[(3, "branches", 0.5), (2, "sometimes", 0.0)],
    ),
)
def test_several_ranks_are_plain_training_on_as_many(
    pool: Pool, tmp_path: Path, ranks: int, kind: str, clip: float
) -> None:
    """Parameters too of which some ranks, or none, have a gradient; another order of the units in a later step."""
    beside_plain(pool, tmp_path, ranks, kind=kind, clip=clip, steps=5)


@pytest.mark.parametrize(("keys", "clip"), combined([{}, DIVIDED], [0.0, 0.5], by_day=[({}, 0.0), (DIVIDED, 0.5)]))
def test_a_step_that_one_rank_spoils_is_rejected_on_all(
    pool: Pool, tmp_path: Path, keys: dict[str, Any], clip: float
) -> None:
    """Micro-batches, and evaluations between steps."""
    train = {"batch": 8, "accumulate": 2, "evaluate_every": 2, "on_nonfinite": "skip"}
    beside_plain(pool, tmp_path, 2, clip=clip, steps=5, bad=17, train=train, tiers=keys)


@pytest.mark.parametrize("keys", [{}, DIVIDED])
def test_ranks_with_unequal_shares(pool: Pool, tmp_path: Path, keys: dict[str, Any]) -> None:
    train, plan = {"batch": 8, "accumulate": 2}, {"batch_fractions": [1, 3]}
    beside_plain(pool, tmp_path, 2, clip=0.5, steps=4, train=train, plan=plan, tiers=keys)
    plan = yaml.safe_load((tmp_path / "a" / "run" / "plan.yaml").read_text())
    assert plan["rows"] == [2, 6] and plan["microbatches"] == [2, 2]


@pytest.mark.parametrize(
    "saver",
    [{"fp8_activations": {}}, pytest.param({"activation_swap": {}}, marks=pytest.mark.nightly)],
)
def test_savers_read_weights_that_other_ranks_have(pool: Pool, tmp_path: Path, saver: dict[str, Any]) -> None:
    """What they keep for backward is the same, though weights are read anew for that."""
    if "activation_swap" in saver:
        saver = {"activation_swap": {"host": "8MB", "file": "64MB", "directory": str(tmp_path / "swap")}}
    beside_plain(pool, tmp_path, 2, clip=0.5, steps=4, kind="causal", plan={"savers": [saver]}, tiers=DIVIDED)


def test_bytes_of_a_step_are_the_forecast(pool: Pool, tmp_path: Path) -> None:
    """With states on all ranks; where ranks divide them it is the most that a step may send."""
    for name, keys in (("none", {}), ("all", DIVIDED)):
        given = {"folder": str(tmp_path / name), "sections": sections(tmp_path / name, clip=0.0, tiers=keys)}
        pool.run("run.jobs:train", 2, steps=2, kind="causal", **given)
        forecast = yaml.safe_load((tmp_path / name / "run" / "plan.yaml").read_text())["forecast"]["wire_bytes"]
        for step in records(tmp_path / name, "step"):
            sent = step["wire_bytes"]["0>1"]
            assert sent == forecast["0>1"] if not keys else forecast["0>1"] // 2 < sent <= forecast["0>1"]


@pytest.mark.parametrize(
    "turns",
    [
        ("divided", "tiered", "plain"),
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in (("tiered",) * 3, ("divided",) * 3, ("tiered", "plain", "divided"))
        ),
    ],
)
def test_a_run_goes_on_with_other_numbers_of_ranks_and_without_tiers(
    pool: Pool, tmp_path: Path, turns: tuple[str, ...]
) -> None:
    """With tiers as without: on 2 ranks, then 1, then 2."""
    digests = []
    asked = {
        "plain": {"train": {"max_grad_norm": 0.0}, "plan": {"exchange": "dense"}},
        "tiered": sections(tmp_path, clip=0.0),
        "divided": sections(tmp_path, clip=0.0, tiers=DIVIDED),
    }
    for name, those in (("a", turns), ("b", ("plain",) * 3)):
        for number, (ranks, kind) in enumerate(zip((2, 1, 2), those, strict=True)):
            until = {"until": 2 * (number + 1), "resume": number > 0, "fresh_plan": True}
            found = pool.run(
                "run.jobs:train", ranks, folder=str(tmp_path / name), sections=asked[kind], steps=6, **until
            )
        digests.append({one["digest"] for one in found})
    assert len(digests[0]) == 1 and all(one == digests[0] for one in digests)


@pytest.mark.parametrize(("keys", "clip"), combined([{}, DIVIDED], [0.0, 0.5], by_day=[(DIVIDED, 0.0)]))
def test_the_smallest_limits_of_several_ranks_work(
    pool: Pool, tmp_path: Path, keys: dict[str, Any], clip: float
) -> None:
    """Each is named by the refusal of less, on all ranks alike."""
    limits = {"device": "1", "host": "1", "file": "1", **keys}
    given = {"steps": 3, "kind": "wide"}
    for tier in ("device", "host", "file"):
        asked = sections(tmp_path, clip=clip, tiers=limits)
        told = pool.attempt("run.jobs:train_in_small_buckets", 2, folder=str(tmp_path / "no"), sections=asked, **given)
        sizes = [re.search(rf"set {tier} to (\d+)", one["error"]) for one in told]
        assert all(sizes), told
        found = {one[1] for one in sizes if one is not None}
        assert len(found) == 1  # though files of divided states differ
        limits[tier] = found.pop()
    assert not (tmp_path / "tiers").exists()
    asked = sections(tmp_path, clip=clip, tiers=limits)
    ours = pool.run("run.jobs:train_in_small_buckets", 2, folder=str(tmp_path / "a"), sections=asked, **given)
    asked = {"train": {"max_grad_norm": clip}, "plan": {"exchange": "dense"}}
    plain = pool.run("run.jobs:train_in_small_buckets", 2, folder=str(tmp_path / "b"), sections=asked, **given)
    assert {one["digest"] for one in ours} == {one["digest"] for one in plain}
    same(saved(tmp_path / "a"), saved(tmp_path / "b"))


def test_ranks_that_run_other_units_than_others_all_say_so(pool: Pool, tmp_path: Path) -> None:
    """At once, and not when one has waited for the other: what some rows alone need is not divided."""
    asked = sections(tmp_path, clip=0.0, tiers=DIVIDED)
    told = pool.attempt("run.jobs:train", 3, folder=str(tmp_path), sections=asked, steps=5, kind="branches")
    assert [one["kind"] for one in told] == ["RunFailed"] * 3
    for one in told:
        assert "rank 0 is at head, rank 1 is at even, rank 2 is at head" in one["error"]
        assert "shard_group to none" in one["error"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("keys", "optimizer"),
    combined(
        [{}, DIVIDED],
        ["adamw_8bit", "coat", "muon", "lamb", OF_TORCH],
        by_day=[({}, "adamw_8bit"), (DIVIDED, "coat"), (DIVIDED, "muon"), ({}, "lamb"), (DIVIDED, OF_TORCH)],
    ),
)
def test_several_ranks_hold_the_states_of_every_optimizer(
    pool: Pool, tmp_path: Path, keys: dict[str, Any], optimizer: Any
) -> None:
    beside_plain(pool, tmp_path, 2, clip=0.5, steps=4, kind="wide", tiers=keys, train={"optimizer": optimizer})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals as on Linux")
@pytest.mark.parametrize("keys", [pytest.param({}, marks=pytest.mark.nightly), DIVIDED])
def test_a_killed_rank_leaves_the_state_after_the_last_step_in_the_files(
    pool: Pool, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """In its third step, when means of some buckets are taken. The run goes on from its checkpoint."""
    asked = sections(tmp_path, clip=0.0, tiers=keys, checkpoint_every=1, keep_checkpoints=9)
    given = {"folder": str(tmp_path / "a"), "steps": 5, "kind": "wide"}
    told = pool.attempt("run.jobs:train_in_small_buckets", 2, sections=asked, killed_at=3, **given)
    assert told[1]["kind"] == "died" and told[0]["kind"] == "PeerLost"
    plain = {
        "train": {"max_grad_norm": 0.0, "checkpoint_every": 1, "keep_checkpoints": 9},
        "plan": {"exchange": "dense"},
    }
    there = {**given, "folder": str(tmp_path / "b")}
    whole = pool.run("run.jobs:train_in_small_buckets", 2, sections=plain, **there)
    known, found = open_checkpoint(tmp_path / "b" / "run" / "checkpoints", 2), dict[str, int]()
    for rank in (0, 1):
        updates, left = read_tiers(tmp_path / "tiers", rank, updates=2)
        assert updates == 2
        for (name, slot), one in left.items():
            if one.numel():
                found[name] = found.get(name, 0) + (not slot)
                assert torch.equal(one, known.read(f"optim/{slot}/{name}" if slot else f"model/{name}")), name
    assert set(found.values()) == {1 if keys else 2} and len(found) == 13
    ours = pool.run("run.jobs:train_in_small_buckets", 2, sections=asked, resume=True, **given)
    assert ours[0]["digest"] == ours[1]["digest"] == whole[0]["digest"]
    assert list((tmp_path / "tiers").iterdir()) == []


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals as on Linux")
@pytest.mark.parametrize(("keys", "clip"), [({}, 0.0), (DIVIDED, 0.5)])
def test_a_killed_update_process_of_one_rank_is_named_there_and_no_other_is_left(
    pool: Pool, tmp_path: Path, keys: dict[str, Any], clip: float
) -> None:
    asked = sections(tmp_path, clip=clip, tiers={**keys, "update": "process"})
    given = {"folder": str(tmp_path), "steps": 5, "kind": "causal"}
    told = pool.attempt("run.jobs:train_with_dead_updater", 2, sections=asked, **given)
    assert [one["kind"] for one in told] == ["PeerLost", "RunFailed"]
    named = re.search(r"update process of this rank \(process (\d+)\) ended with signal SIGKILL", told[1]["error"])
    assert named is not None and not Path(f"/proc/{named[1]}").exists()
    files = {str(one) for one in (tmp_path / "tiers").glob("*.tier")}
    assert not [one for one in Path("/proc").glob("[0-9]*/fd/*") if one.is_symlink() and pointed(one) in files]


@pytest.mark.nightly
@pytest.mark.parametrize(("keys", "clip"), combined([{}, DIVIDED], [0.0, 0.5], by_day=[({}, 0.5), (DIVIDED, 0.0)]))
def test_several_ranks_with_update_processes(pool: Pool, tmp_path: Path, keys: dict[str, Any], clip: float) -> None:
    beside_plain(pool, tmp_path, 2, clip=clip, steps=4, kind="habits", tiers={**keys, "update": "process"})
    beside_plain(pool, tmp_path / "2", 2, clip=clip, steps=4, kind="gpt2", tiers={**keys, "update": "process"})
