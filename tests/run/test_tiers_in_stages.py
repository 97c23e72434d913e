"""Model states in tiers in pipeline stages, as whole runs: what the same stages compute with all in memory, bit for
bit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gossamer.sharding import read_tiers
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool
from run.test_tiers import beside_plain, combined, records, same, saved, sections

TWO = {"mesh": {"pipe": 2}}
GPIPE = {**TWO, "pipeline_schedule": "gpipe"}
AGAIN = {**TWO, "savers": ["recompute"]}
LATE = {**TWO, "cuts": ["embed", "layers.1"]}  # most blocks are in the second stage


def in_stages(folder: Path, *, plan: dict[str, Any] = TWO, **given: Any) -> dict[str, Any]:
    found = sections(folder, **given)
    found["plan"] |= plan
    return found


@pytest.mark.parametrize(
    ("plan", "kind", "clip"),
    combined(
        [TWO, GPIPE, AGAIN],
        ["gpt2", "gpt2 untied", "llama", "small", "headed", "counting", "marks", "late", "halves", "thin"],
        [0.0, 0.5],
        by_day=[(TWO, "gpt2", 0.0), (GPIPE, "small", 0.5), (AGAIN, "headed", 0.0)],
    ),
)
def test_two_stages_are_plain_training_in_two(
    pool: Pool, tmp_path: Path, plan: dict[str, Any], kind: str, clip: float
) -> None:
    """Weights that both stages have, and that one has; micro-batches whose passes overlap; forwards that run again."""
    steps = 2 if kind == "gpt2" else 3  # a forward of its stages runs the blocks of others on shapes
    beside_plain(pool, tmp_path, 2, clip=clip, steps=steps, kind=kind, plan=plan, train={"accumulate": 4})


@pytest.mark.parametrize("clip", [0.0, pytest.param(0.5, marks=pytest.mark.nightly)])
def test_a_step_that_is_rejected_moves_no_stage(pool: Pool, tmp_path: Path, clip: float) -> None:
    """With evaluations between steps; a tied weight of both stages gives the memory of its gradient back."""
    train = {"batch": 8, "accumulate": 2, "evaluate_every": 2, "on_nonfinite": "skip"}
    beside_plain(pool, tmp_path, 2, clip=clip, steps=5, kind="small", bad=17, plan=TWO, train=train)


@pytest.mark.parametrize("clip", [0.5, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_two_replicas_of_two_stages(pool: Pool, tmp_path: Path, clip: float) -> None:
    """Each stage averages over its replicas, and tied weights are summed then. The bytes are those of the forecast."""
    beside_plain(pool, tmp_path, 4, clip=clip, steps=2, kind="small", plan=TWO, train={"accumulate": 2})
    forecast = yaml.safe_load((tmp_path / "a" / "run" / "plan.yaml").read_text())["forecast"]["wire_bytes"]
    for step in records(tmp_path / "a", "step"):
        assert step["wire_bytes"] == {link: count for link, count in forecast.items() if link.startswith("0>")}
    said = [one["message"] for one in records(tmp_path / "a", "event")]
    assert any("each of the 4 ranks has the states of its stage" in one for one in said)


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("ranks", "stages"), [(3, [[0, 1], [2]]), (3, [[0], [1, 2]]), (3, [[0], [1], [2]])])
def test_uneven_and_more_stages(pool: Pool, tmp_path: Path, ranks: int, stages: list[list[int]], clip: float) -> None:
    plan = {"mesh": {"pipe": len(stages)}, "stage_ranks": stages}
    beside_plain(pool, tmp_path, ranks, clip=clip, steps=3, kind="gpt2", plan=plan, train={"accumulate": 4})


def test_a_run_in_stages_goes_on_in_one_process_without_tiers_and_back(pool: Pool, tmp_path: Path) -> None:
    train: dict[str, Any] = {"max_grad_norm": 0.0, "accumulate": 2}
    one = {"train": train, "plan": {"exchange": "dense"}}
    stages = {"a": in_stages(tmp_path, clip=0.0, accumulate=2), "b": {"train": train, "plan": TWO}}
    for name, staged in stages.items():
        for turn, (ranks, asked) in enumerate(((2, staged), (1, one), (2, staged))):
            until = {"until": 2 * (turn + 1), "resume": turn > 0, "fresh_plan": True}
            given = {"folder": str(tmp_path / name), "sections": asked, "steps": 6, "kind": "small", **until}
            pool.run("run.jobs:train", ranks, **given)
    same(saved(tmp_path / "a"), saved(tmp_path / "b"))
    losses = [[one["loss"] for one in records(tmp_path / name, "step")] for name in "ab"]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def smallest(pool: Pool, folder: Path, accumulate: int) -> dict[str, str]:
    """Return the limits that the refusals of less name, the same on all ranks though stages have other parameters."""
    limits = {"device": "1", "host": "1", "file": "1"}
    for tier in limits:
        given = {"sections": in_stages(folder, plan=LATE, clip=0.0, tiers=limits, accumulate=accumulate)}
        told = pool.attempt(
            "run.jobs:train_in_small_buckets", 2, folder=str(folder / "no"), steps=3, kind="wide", **given
        )
        sizes = [re.search(rf"set {tier} to (\d+)", one["error"]) for one in told]
        assert all(sizes), told
        found = {one[1] for one in sizes if one is not None}
        assert len(found) == 1
        limits[tier] = found.pop()
    return limits


def test_the_smallest_limits_work_and_updates_make_room_during_backward(pool: Pool, tmp_path: Path) -> None:
    """With one micro-batch the gradients of a stage do not fit `host` at a time: updates run beside its backward."""
    limits = smallest(pool, tmp_path, 1)
    assert int(limits["host"]) < int(smallest(pool, tmp_path, 2)["host"])  # which is to hold all gradients
    given = {"steps": 3, "kind": "wide"}
    asked = in_stages(tmp_path, plan=LATE, clip=0.0, tiers=limits, accumulate=1)
    ours = pool.run("run.jobs:train_in_small_buckets", 2, folder=str(tmp_path / "a"), sections=asked, **given)
    plain = {"train": {"max_grad_norm": 0.0, "accumulate": 1}, "plan": LATE}
    others = pool.run("run.jobs:train_in_small_buckets", 2, folder=str(tmp_path / "b"), sections=plain, **given)
    assert [one["digest"] for one in ours] == [one["digest"] for one in others]
    same(saved(tmp_path / "a"), saved(tmp_path / "b"))


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_update_processes_of_stages(pool: Pool, tmp_path: Path, clip: float) -> None:
    given = {"steps": 3, "kind": "gpt2", "plan": TWO, "train": {"accumulate": 2}}
    beside_plain(pool, tmp_path, 2, clip=clip, tiers={"update": "process"}, **given)


@pytest.mark.nightly
@pytest.mark.parametrize("saver", ["fp8_activations", "activation_swap", "recompute"])
def test_savers_in_stages_with_tiers(pool: Pool, tmp_path: Path, saver: str) -> None:
    """What they keep for backward is the same, though weights are read anew for that."""
    swap = {"host": "8MB", "file": "64MB", "directory": str(tmp_path / "swap")}
    settings: dict[str, dict[str, Any]] = {
        "fp8_activations": {},
        "activation_swap": swap,
        "recompute": {"units": ["layers.0", "layers.1", "layers.2", "layers.3"]},
    }
    plan = {**TWO, "savers": [{saver: settings[saver]}]}
    beside_plain(pool, tmp_path, 2, clip=0.5, steps=3, kind="causal", plan=plan, train={"accumulate": 2})


@pytest.mark.nightly
def test_tiled_layers_in_stages_with_tiers(pool: Pool, tmp_path: Path) -> None:
    """Evaluation has tiles with tiers alone; training has the same."""
    plan = {**TWO, "savers": [{"tiling": {"linears": "*", "tiles": 3}}]}
    given = {"steps": 3, "kind": "causal"}
    ours, others = (
        pool.run("run.jobs:train", 2, folder=str(tmp_path / side), sections=asked, **given)
        for side, asked in (
            ("a", in_stages(tmp_path, plan=plan, clip=0.5, accumulate=2)),
            ("b", {"train": {"max_grad_norm": 0.5, "accumulate": 2}, "plan": plan}),
        )
    )
    assert [one["digest"] for one in ours] == [one["digest"] for one in others]
    same(saved(tmp_path / "a"), saved(tmp_path / "b"))


@pytest.mark.parametrize(("ranks", "plan"), [(2, TWO), (1, {})])
def test_weights_are_read_ahead_in_the_order_of_the_schedule_from_the_first_step_on(
    pool: Pool, tmp_path: Path, ranks: int, plan: dict[str, Any]
) -> None:
    asked = in_stages(tmp_path, plan=plan, clip=0.0, accumulate=4)
    found = pool.run("run.jobs:train_retracing", ranks, folder=str(tmp_path), sections=asked, steps=2, kind="causal")
    assert [one["retraced"] for one in found] == [0] * ranks


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals as on Linux")
def test_a_killed_stage_leaves_the_state_after_one_step_in_all_files(pool: Pool, tmp_path: Path) -> None:
    """In its third step. The other stage has the state after the same step, and the run goes on."""
    asked = in_stages(tmp_path, plan=LATE, clip=0.0, checkpoint_every=1, keep_checkpoints=9)
    given = {"folder": str(tmp_path / "a"), "steps": 5, "kind": "wide"}
    told = pool.attempt("run.jobs:train_in_small_buckets", 2, sections=asked, killed_at=3, **given)
    assert told[1]["kind"] == "died" and told[0]["kind"] == "PeerLost"
    plain = {"train": {"max_grad_norm": 0.0, "checkpoint_every": 1, "keep_checkpoints": 9}, "plan": LATE}
    whole = pool.run("run.jobs:train_in_small_buckets", 2, sections=plain, **{**given, "folder": str(tmp_path / "b")})
    known, found = open_checkpoint(tmp_path / "b" / "run" / "checkpoints", 2), set[str]()
    for rank in (0, 1):
        updates, left = read_tiers(tmp_path / "tiers", rank, updates=2)
        assert updates == 2
        for (name, slot), one in left.items():
            found.add(name)
            assert torch.equal(one, known.read(f"optim/{slot}/{name}" if slot else f"model/{name}")), name
    assert len(found) == 13
    ours = pool.run("run.jobs:train_in_small_buckets", 2, sections=asked, resume=True, **given)
    assert [one["digest"] for one in ours] == [one["digest"] for one in whole]
    assert list((tmp_path / "tiers").iterdir()) == []
