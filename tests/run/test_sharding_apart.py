"""Sharded states of islands that train apart, as whole runs over gloo: the training of whole states, each island's
dealt out among its own ranks, kept over a stop and over a change of islands.
"""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gossamer.store.checkpoint import Checkpoint, open_checkpoint
from pool import Pool
from run.test_sharding import records

SHARDED: list[Any] = [{"zero1": {"shard_group": "island"}}, {"zero2": {"shard_group": "island"}}]
EVEN, UNEVEN, LONE = ((0, 1), (2, 3)), ((0, 1, 2), (3, 4)), ((0, 1), (2,))
DILOCO = {"diloco": {"sync_every": 3}}
each_sharding = pytest.mark.parametrize(
    "states", [pytest.param(SHARDED[0], marks=pytest.mark.nightly), SHARDED[1]], ids=["zero1", "zero2"]
)


def sections(
    states: Any, written: Any = DILOCO, islands: Any = EVEN, exchange: Any = "auto", **train: Any
) -> dict[str, Any]:
    return {
        "plan": {"sharding": states, "sync": written, "exchange": exchange},
        "machines": {"islands": [list(i) for i in islands]},
        "train": {"batch": 4 * sum(map(len, islands)), **train},
    }


def same_training(pool: Pool, folder: Path, ranks: int, states: Any, **given: Any) -> None:
    """That of whole states to 1e-6, of all numbers and of rank 0's norms; bit for bit on all ranks."""
    written = {name: given.pop(name) for name in ("written", "islands", "accumulate", "batch") if name in given}
    found, norms = {}, {}
    for name, one in (("none", "none"), ("parts", states)):
        where = folder / name
        ran = {"folder": str(where), "steps": 7, "dropout": 0.1, "values": True, **given}
        found[name] = pool.run("run.jobs:train", ranks, sections=sections(one, **written), **ran)
        norms[name] = [one["grad_norm"] for one in records(where, "step")]
    assert all(one["digest"] == found["parts"][0]["digest"] for one in found["parts"])
    ours, wanted = (torch.tensor(found[name][0]["values"]) for name in ("parts", "none"))
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
    assert norms["parts"] == pytest.approx(norms["none"], rel=1e-5)
    assert max(norms["none"]) > 0.5, "no step was clipped"


@each_sharding
def test_two_rounds_are_those_of_whole_states(pool: Pool, tmp_path: Path, states: Any) -> None:
    """Clipped steps of several micro-batches, dropout, tied weights; the last round is of one step."""
    same_training(pool, tmp_path, 4, states, accumulate=2)


@each_sharding
@pytest.mark.parametrize("islands", [UNEVEN, LONE], ids=["3+2", "2+1"])
def test_islands_of_unequal_size(pool: Pool, tmp_path: Path, islands: Any, states: Any) -> None:
    """As many ranks of each hold states as the smallest has: of two, or of one, which then holds all of them."""
    same_training(pool, tmp_path, sum(map(len, islands)), states, islands=islands)


@pytest.mark.parametrize(
    "written",
    [
        {"diloco": {"sync_every": 1}},
        {"post_local_sgd": {"sync_every": 2, "warmup_steps": 3}},
        {"streaming_diloco": {"sync_every": 4, "fragments": 2, "sync_delay": 1}},
        {"cser": {"sync_every": 3, "step_exchange": {"random_blocks": {"fraction": 0.25, "block_size": 8}}}},
        {"diloco": {"sync_every": 3, "local_steps": [3, 2]}},
    ],
    ids=json.dumps,
)
def test_other_outer_loops(pool: Pool, tmp_path: Path, written: Any) -> None:
    """Rounds of one step; steps together first; what is late; what every step exchanges; an island that makes fewer."""
    same_training(pool, tmp_path, 4, SHARDED[0], written=written)


def test_parameters_of_fewer_rows_than_ranks(pool: Pool, tmp_path: Path) -> None:
    same_training(pool, tmp_path, 4, SHARDED[1], kind="thin", dropout=0.0)


CODED = {"error_feedback": {"two_shot": {"codec": "int8"}}}
BYTES: list[Any] = [
    (0, EVEN, "dense"),
    (1, EVEN, {"hierarchical": {"inter": CODED, "intra_codec": "bfloat16"}}),
    (0, UNEVEN, CODED),
    (1, UNEVEN, "dense"),
    (0, UNEVEN, {"error_feedback": {"topk": {"fraction": 0.1}}}),
]


@pytest.mark.parametrize(("which", "islands", "exchange"), BYTES, ids=json.dumps)
def test_bytes_are_those_of_the_plan_over_a_round(
    pool: Pool, tmp_path: Path, which: int, islands: Any, exchange: Any
) -> None:
    """Whatever meets inside an island; all ranks agree in the end."""
    given = {"folder": str(tmp_path), "steps": 6, "sections": sections(SHARDED[which], DILOCO, islands, exchange)}
    found = pool.run("run.jobs:train", sum(map(len, islands)), **given)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    assert f"states are shared out among {min(map(len, islands))} of its ranks" in plan["reasons"]["sync"]
    said = {link: n for link, n in plan["forecast"]["wire_bytes"].items() if link.startswith("0>")}
    steps = records(tmp_path, "step")
    for link, n in said.items():
        sent = sum(one["wire_bytes"].get(link, 0) for one in steps)
        assert sent / 6 == pytest.approx(n, abs=18), link  # of words it is the mean, and when they go is not planned


def test_feedback_goes_on_inside_an_island_when_it_parts(pool: Pool, tmp_path: Path) -> None:
    """What is owed from the steps together is paid apart: with dense feedback at the end all has come, as of whole."""
    found = {}
    for name, states in (("none", "none"), ("parts", SHARDED[0])):
        given = sections(
            states, {"post_local_sgd": {"sync_every": 2, "warmup_steps": 3}}, EVEN, {"error_feedback": "dense"}
        )
        ran = {"folder": str(tmp_path / name), "steps": 6, "values": True, "sections": given}
        found[name] = torch.tensor(pool.run("run.jobs:train", 4, **ran)[0]["values"])
    torch.testing.assert_close(found["parts"], found["none"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("which", "islands"),
    [pytest.param(0, EVEN, marks=pytest.mark.nightly), (1, UNEVEN), (0, LONE)],
    ids=["2+2", "3+2", "2+1"],
)
def test_a_run_stopped_in_a_round_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, which: int, islands: Any) -> None:
    """Each island's states are there, every number of them once."""
    ranks = sum(map(len, islands))
    written = sections(SHARDED[which], DILOCO, islands, CODED, checkpoint_every=5)
    given = {"steps": 8, "dropout": 0.1, "sections": written}
    whole = pool.run("run.jobs:train", ranks, folder=str(tmp_path), **given)
    checkpoints = tmp_path / "run" / "checkpoints"
    check_states(open_checkpoint(checkpoints, 5), islands)
    shutil.rmtree(checkpoints / "step-00000008")
    again = pool.run("run.jobs:train", ranks, folder=str(tmp_path), resume=True, **given)
    assert {one["digest"] for one in (*whole, *again)} == {whole[0]["digest"]}


def check_states(checkpoint: Checkpoint, islands: Any) -> None:
    """Under the number of each island's first rank, and another one on each; half of it on each of two owners."""
    names = [name for name in checkpoint.names() if name.startswith("optim/")]
    firsts, total = [island[0] for island in islands], 0
    for name in names:
        assert checkpoint.replicas(name) == tuple(firsts)
        total += prod(checkpoint.shape(name, firsts[0]))
    one, other = (checkpoint.read("optim/mean/embed.weight", replica=first) for first in firsts)
    assert not torch.equal(one, other) and bool(one.any()) and bool(other.any())
    owners, rows = min(map(len, islands)), sum(prod(checkpoint.shape(name, firsts[0])[1:]) for name in names)
    for island in islands:
        files = [checkpoint.folder / f"rank-{rank:05d}.safetensors" for rank in island]
        held = [sum(t.numel() for n, t in load_file(one).items() if n.startswith("optim/")) for one in files]
        assert sum(held) == total and not any(held[owners:])
        assert all(abs(n - total / owners) <= rows for n in held[:owners])


WAYS: list[Any] = [
    (SHARDED[0], ((0, 2), (1, 3)), 4),
    ("none", EVEN, 4),
    (SHARDED[1], ((0, 1), (2,)), 3),
    pytest.param("none", ((0,), (1,)), 2, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("states", "islands", "ranks"), WAYS, ids=["others", "none", "fewer", "whole, fewer"])
def test_a_checkpoint_of_islands_goes_on_in_other_ways(
    pool: Pool, tmp_path: Path, states: Any, islands: Any, ranks: int
) -> None:
    """On the same islands, whole or not, to 1e-6; other ones start from the anchor, with the mean of the states, as
    those of whole states do.
    """
    found = {}
    for name, before, after in (("ours", SHARDED[0], states), ("plain", "none", "none")):
        folder = str(tmp_path / name)
        pool.run("run.jobs:train", 4, folder=folder, steps=8, until=5, sections=sections(before, batch=16))
        given = {"folder": folder, "steps": 8, "resume": True, "values": True, "fresh_plan": True}
        found[name] = pool.run("run.jobs:train", ranks, sections=sections(after, DILOCO, islands, batch=16), **given)
        said = [one["message"] for one in records(tmp_path / name, "event")]
        assert any("start from its global parameters" in one for one in said) == (islands != EVEN)
    ours, plain = (torch.tensor(found[name][0]["values"]) for name in ("ours", "plain"))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_trained_together_then_apart_then_together(pool: Pool, tmp_path: Path) -> None:
    """States over all ranks, then of each island, then whole, then of each island again."""
    found = {}
    ways = [("zero1", "every_step"), (SHARDED[1], DILOCO), ("none", "every_step"), (SHARDED[0], DILOCO)]
    for name in ("ours", "plain"):
        for turn, (states, written) in enumerate(ways):
            given = {"folder": str(tmp_path / name), "steps": 17, "resume": turn > 0, "fresh_plan": True}
            until = {} if turn == 3 else {"until": 4 * (turn + 1) + 1}
            one = sections(states if name == "ours" else "none", written)
            found[name] = pool.run("run.jobs:train", 4, sections=one, values=True, **until, **given)
    ours, plain = (torch.tensor(found[name][0]["values"]) for name in ("ours", "plain"))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_hosts_with_disks_of_their_own(pool: Pool, tmp_path: Path) -> None:
    """No disk has all rows: each rank finds its own again, on the same islands alone."""
    given = {"steps": 8, "sections": sections(SHARDED[0])}
    whole = pool.run("run.jobs:train", 4, folder=str(tmp_path / "none"), **given)
    apart = {"folder": str(tmp_path / "disk{rank}"), "disks": True, **given}
    pool.run("run.jobs:train", 4, until=5, **apart)
    kept = {rank: tmp_path / f"copy{rank}" for rank in range(4)}
    for rank, copy in kept.items():
        shutil.copytree(tmp_path / f"disk{rank}", copy)
    again = pool.run("run.jobs:train", 4, resume=True, **apart)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]
    others = {
        **apart,
        "folder": str(tmp_path / "copy{rank}"),
        "sections": sections(SHARDED[0], islands=((0, 2), (1, 3))),
    }
    answers = pool.attempt("run.jobs:train", 4, resume=True, fresh_plan=True, **others)
    assert all("resume with the same islands" in one["error"] for one in answers)


def test_model_state_is_what_the_plan_says(pool: Pool, tmp_path: Path) -> None:
    """Between two steps, of everything that Python holds: in islands of two ranks 16, 12 and 10 bytes a parameter, and
    eight of the anchor and its momentum.
    """
    found, said = {}, {}
    for name, states in (("none", "none"), ("zero1", SHARDED[0]), ("zero2", SHARDED[1])):
        given = {"folder": str(tmp_path / name), "steps": 3, "kind": "wide", "counts": True}
        ran = pool.run("run.jobs:train", 4, sections=sections(states, {"diloco": {"sync_every": 50}}), **given)
        found[name] = [one["bytes"][-1] for one in ran]
        plan = yaml.safe_load((tmp_path / name / "run" / "plan.yaml").read_text())
        said[name] = plan["forecast"]["state_bytes"]
    numel = 16 * 192 + 6 * (192 * 192 + 192)
    for name, per_parameter in {"none": 16, "zero1": 12, "zero2": 10}.items():
        assert max(said[name]) == pytest.approx((8 + per_parameter) * numel, rel=0.02)
        for rank in range(4):
            saved, forecast = (of["none"][rank] - of[name][rank] for of in (found, said))
            assert saved == pytest.approx(forecast, rel=0.02, abs=0.01 * numel)


def test_a_gradient_that_is_not_finite_is_its_island_s_alone(pool: Pool, tmp_path: Path) -> None:
    given = sections(SHARDED[1], DILOCO, on_nonfinite="skip")
    found = pool.run("run.jobs:train", 4, folder=str(tmp_path), steps=6, bad=10, sections=given)
    assert len({one["digest"] for one in found}) == 1
    rejected = [one["rejected"] for one in records(tmp_path, "islands")]
    assert sorted(sum(island) for island in zip(*rejected, strict=True)) == [0, 1]


def plan_of(states: Any, **more: Any) -> dict[str, Any]:
    given = sections(states, islands=((0, 1),))
    return {**given, "plan": {**given["plan"], **more}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    (plan_of("zero1"), "small", "plan.sharding: wanted states sharded inside each island"),
    (plan_of("zero2"), "small", "write plan.sharding: {zero2: {shard_group: island}}"),
    (plan_of("zero3"), "small", "plan.sharding: wanted zero1 or zero2 with local updates"),
    (
        plan_of({"sdp4bit": {"shard_group": "island"}}),
        "small",
        "plan.sharding: wanted zero1 or zero2 with local updates",
    ),
    (plan_of(SHARDED[0]), "halves", "plan.sharding: wanted float32 parameters"),
    (plan_of(SHARDED[0], adapt={"bcrs": {"fraction": 0.05}}), "small", "plan.sharding: wanted no policy"),
    (
        {**plan_of(SHARDED[0], sync={"zero_one": {"var_freeze_step": 2}}), "train": {"optimizer": "zero_one_adam"}},
        "small",
        "plan.sharding: wanted an optimizer that is the same by rows",
    ),
]


@pytest.mark.parametrize(("given", "kind", "said"), BAD, ids=[said[:50] for *_, said in BAD])
def test_bad_input(pool: Pool, tmp_path: Path, given: dict[str, Any], kind: str, said: str) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=4, kind=kind, sections=given)
    assert all(one["kind"] == "BadInput" for one in answers), answers
    assert said in answers[0]["error"]
