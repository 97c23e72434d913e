"""Islands that bring their second moments together, as whole runs over gloo: what they learn, bytes, stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import sync
from gossamer.comm.message import ProcessGroups
from gossamer.plan._traffic import round_bytes
from gossamer.spec.errors import BadInput
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool
from run.test_sharding import records
from sync.apart_jobs import SHAPES

MOMENTS: dict[str, Any] = {
    "diloco": {"diloco": {"sync_every": 2, "average_second_moments_every": 2}},
    "late": {
        "diloco": {
            "sync_every": 4,
            "fragments": 2,
            "sync_delay": 2,
            "keep_local_progress": True,
            "outer_optimizer": "average",
            "average_second_moments_every": 1,
        }
    },
    "after": {"diloco": {"sync_every": 2, "warmup_steps": 3, "average_second_moments_every": 4}},
}
each_way = pytest.mark.parametrize("name", MOMENTS)


def sections(written: Any, **more: Any) -> dict[str, Any]:
    return {"plan": {"sync": written}, "train": {"checkpoint_every": 5}, **more}


def commons(folder: Path, step: int, ranks: int = 2) -> list[torch.Tensor]:
    """By rank, what its rule has learnt."""
    checkpoint = open_checkpoint(folder / "run" / "checkpoints", step)
    names = sorted(n for n in checkpoint.names() if n.startswith("optim/common/"))
    return [torch.cat([checkpoint.read(n, replica=rank).flatten() for n in names]) for rank in range(ranks)]


@each_way
def test_all_islands_learn_the_same(pool: Pool, tmp_path: Path, name: str) -> None:
    """Something, with the first round that goes out after the one it was sent with; they end in one place."""
    given = {"folder": str(tmp_path), "steps": 10, "dropout": 0.1, "sections": sections(MOMENTS[name])}
    found = pool.run("run.jobs:train", 2, **given)
    assert found[0]["digest"] == found[1]["digest"]
    first, second = commons(tmp_path, 10)
    assert torch.equal(first, second) and float(first.sum()) > 0 and bool((first >= 0).all())


def test_what_is_learnt_is_the_mean_of_what_they_knew(pool: Pool, tmp_path: Path) -> None:
    """Sent with the first round, in a byte a number; learnt with the second."""
    written = sections({"diloco": {"sync_every": 5, "average_second_moments_every": 9}})
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=10, sections=written)
    before, after = (open_checkpoint(tmp_path / "run" / "checkpoints", step) for step in (5, 10))
    names = sorted(n for n in before.names() if n.startswith("optim/square/"))
    assert not any(commons(tmp_path, 5)[0].tolist())
    for name in names:
        known = [before.read(name, replica=rank) / (1 - 0.95**5) for rank in range(2)]
        mean, learnt = sum(known) / 2, after.read(name.replace("square", "common"), replica=0)
        assert torch.all((learnt - mean).abs() <= 0.29 * mean + 1e-8 * mean.max()), name  # e5m2, twice


@each_way
@pytest.mark.parametrize(
    "until", [pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly), 6]
)
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, name: str, until: int) -> None:
    given = {"steps": 9, "dropout": 0.1, "sections": sections(MOMENTS[name])}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), until=until, **given)
    again = pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


def test_it_goes_on_from_any_other_way_and_into_any_other(pool: Pool, tmp_path: Path) -> None:
    """Together, apart each with its own, with common ones, with its own, together."""
    ways = ["every_step", {"diloco": {"sync_every": 2}}, MOMENTS["diloco"], {"diloco": {"sync_every": 2}}, "every_step"]
    for turn, written in enumerate([*ways, MOMENTS["late"]]):
        given = {"folder": str(tmp_path), "steps": 19, "resume": turn > 0, "fresh_plan": True}
        until = {} if turn == len(ways) else {"until": 3 * (turn + 1)}
        found = pool.run("run.jobs:train", 2, sections=sections(written), **until, **given)
    assert found[0]["digest"] == found[1]["digest"]
    steps = records(tmp_path, "step")
    assert [one["step"] for one in steps] == list(range(1, 20)) and steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_islands_go_on_from_what_was_agreed(pool: Pool, tmp_path: Path, ranks: int) -> None:
    given = {"folder": str(tmp_path), "steps": 9, "sections": sections(MOMENTS["late"])}
    pool.run("run.jobs:train", 2, until=5, **given)
    found = pool.run("run.jobs:train", ranks, resume=True, **given)
    assert all(one["digest"] == found[0]["digest"] and not one["ended"] for one in found)


@pytest.mark.parametrize(
    ("every", "rounds"), [(0, []), (1, range(1, 41)), (3, [1, *range(3, 41, 3)]), (16, [1, 4, 16, 32])]
)
def test_rounds_in_which_they_meet(every: int, rounds: Sequence[int]) -> None:
    loop = sync.build({"diloco": {"sync_every": 4, "average_second_moments_every": every}}).loop
    assert loop is not None and [n for n in range(1, 41) if loop.tells(n - 1)] == list(rounds)


def test_bytes_of_a_round_are_known_before(pool: Pool) -> None:
    """Over a whole cycle, when second moments no longer meet as often as at first."""
    written = {"diloco": {"sync_every": 4, "fragments": 2, "sync_delay": 1, "average_second_moments_every": 3}}
    loop, levels = sync.build(written).loop, ProcessGroups.islands([[0], [1]])
    assert loop is not None and loop.cycle == 12
    found = pool.run("sync.apart_jobs:rounds", 2, written=written, steps=36, finish=False)
    links, plain = (
        round_bytes(one, tuple(SHAPES.items()), levels, units=("a", "b"), bucket_bytes=1 << 20)
        for one in (loop, replace(loop, average_second_moments_every=0))
    )
    for rank, one in enumerate(found):
        assert sum(one["sent"][24:]) == links[f"{rank}>{1 - rank}"] > 3 * plain[f"{rank}>{1 - rank}"]


def test_ranks_of_an_island_learn_the_same(pool: Pool, tmp_path: Path) -> None:
    """Two ranks that have seen the same, and one by itself."""
    written = sections(MOMENTS["diloco"], machines={"islands": [[0, 1], [2]]})
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=10, sections=written)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    first, second, third = commons(tmp_path, 10, ranks=3)
    assert torch.equal(first, second) and torch.equal(first, third) and float(first.sum()) > 0


def test_an_island_that_has_made_no_step_yet_keeps_nobody_waiting(pool: Pool, tmp_path: Path) -> None:
    """Its first step is rejected, and it has nothing to tell: it says so, and counts for nothing."""
    written = sections({"diloco": {"sync_every": 1, "average_second_moments_every": 1}})
    written["train"]["on_nonfinite"] = "skip"
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=5, bad=5, sections=written)
    assert found[0]["digest"] == found[1]["digest"]
    rejected = [one["rejected"] for one in records(tmp_path, "islands")]
    assert [sum(island) for island in zip(*rejected, strict=True)] == [0, 1]
    first, second = commons(tmp_path, 5)
    assert torch.equal(first, second) and float(first.sum()) > 0


@pytest.mark.parametrize("start", [0, 3])
def test_alone_it_is_adamw(pool: Pool, tmp_path: Path, start: int) -> None:
    """One island has nobody to learn from, apart from the first step on or later."""
    found = {}
    for name, more in (("common", {"average_second_moments_every": 2}), ("own", {})):
        written = {"diloco": {"sync_every": 2, "warmup_steps": start, **more}}
        given = {"folder": str(tmp_path / name), "steps": 6, "values": True, "sections": sections(written)}
        found[name] = torch.tensor(pool.run("run.jobs:train", 1, **given)[0]["values"])
    torch.testing.assert_close(found["common"], found["own"], rtol=1e-6, atol=1e-6)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"train": {"optimizer": {"sgd": {"lr": 0.1}}}}, "adamw, whose second moments can be averaged across islands"),
    (
        {"plan": {"sharding": {"zero1": {"shard_group": "island"}}}},
        "optimizer states that are not sharded, to average second moments",
    ),
    (
        {"plan": {"sync": {"diloco": {"sync_every": 2, "average_second_moments_every": -1}}}},
        "average_second_moments_every: wanted 0 or more rounds",
    ),
]


@pytest.mark.parametrize(("more", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input(pool: Pool, tmp_path: Path, more: dict[str, Any], said: str) -> None:
    given = {"plan": {"sync": MOMENTS["diloco"], **more.get("plan", {})}, "train": more.get("train", {})}
    with pytest.raises(Exception, match=said) as caught:
        pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=4, sections=given)
    assert BadInput.__name__ in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints").exists()
