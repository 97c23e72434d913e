"""Sharded states, as whole runs: the same training with a part of the update rule's state on every rank."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gossamer import memory
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool

ZERO = ("zero1", "zero2", "zero3")
EXCHANGES: list[Any] = [
    "dense",
    {"two_shot": {"codec": "bfloat16"}},
    {"error_feedback": {"two_shot": {"codec": "int8"}}},
    {"error_feedback": {"topk": {"fraction": 0.1}}},
]


def sections(states: str, exchange: Any = "dense", **train: Any) -> dict[str, dict[str, Any]]:
    return {"plan": {"states": states, "exchange": exchange}, "train": train}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_is_plain_data_parallelism(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Clipped and unclipped steps, dropout, tied weights, unequal rows: equal to 1e-6, on all ranks bit for bit."""
    found, norms = {}, {}
    for states in ("whole", *ZERO):
        given = {"folder": str(tmp_path / states), "steps": 6, "dropout": 0.1, "values": True}
        found[states] = pool.run("run.jobs:train", ranks, sections=sections(states), **given)
        norms[states] = [one["grad_norm"] for one in records(tmp_path / states, "step")]
    for states in ZERO:
        assert all(one["digest"] == found[states][0]["digest"] for one in found[states])
        ours, plain = (torch.tensor(found[one][0]["values"]) for one in (states, "whole"))
        assert torch.allclose(ours, plain, rtol=1e-6, atol=1e-6)
        assert norms[states] == pytest.approx(norms["whole"], rel=1e-5)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=json.dumps)
def test_any_exchange_and_its_bytes(pool: Pool, tmp_path: Path, exchange: Any) -> None:
    """Coded gradients lose what they lose, the same at each stage; all ranks end in the same place, and what was sent
    was known before.
    """
    digests = set()
    for states in ZERO:
        given = {"folder": str(tmp_path / states), "steps": 6, "sections": sections(states, exchange)}
        digests |= {one["digest"] for one in pool.run("run.jobs:train", 2, **given)}
        plan = (tmp_path / states / "run" / "plan.yaml").read_text()
        (said,) = [line.split(": ")[1] for line in plan.splitlines() if "0>1:" in line]
        for one in records(tmp_path / states, "step"):
            assert one["wire_bytes"]["0>1"] == int(said)
    assert len(digests) == 1


@pytest.mark.parametrize("codec", ["identity", "bfloat16", "int8"])
def test_codes_bring_what_they_bring_without_sharding(pool: Pool, tmp_path: Path, codec: str) -> None:
    """One step of SGD: the mean gradient, but for what the code loses."""
    found = {}
    sgd = {"optimizer": {"sgd": {"lr": 1.0}}, "schedule": "constant", "clip": 0.0}
    for states, exchange in (("whole", "dense"), ("zero1", {"two_shot": {"codec": codec}})):
        given = {"folder": str(tmp_path / states), "steps": 1, "values": True}
        found[states] = pool.run("run.jobs:train", 3, sections=sections(states, exchange, **sgd), **given)[0]["values"]
    off = (torch.tensor(found["zero1"]) - torch.tensor(found["whole"])).abs()
    limit = {"identity": 1e-6, "bfloat16": 2**-8, "int8": 2**-6}[codec]  # of gradients below 1
    assert off.max() < limit


def test_dense_sends_what_an_all_reduce_does(pool: Pool, tmp_path: Path) -> None:
    sent = {}
    for states in ("whole", "zero1"):
        folder = tmp_path / states
        pool.run("run.jobs:train", 2, folder=str(folder), steps=2, sections=sections(states))
        sent[states] = sum(records(folder, "step")[0]["wire_bytes"].values())
    assert sent["zero1"] == pytest.approx(sent["whole"], rel=0.03)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=json.dumps)
def test_differences_in_four_bits_leave_all_ranks_in_the_same_place(pool: Pool, tmp_path: Path, exchange: Any) -> None:
    """Also over a stop: the float32 rows are kept, and what is sent was known before."""
    given = {"steps": 6, "sections": sections("sdp4bit", exchange)}
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path / "whole"), **given)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    plan = (tmp_path / "whole" / "run" / "plan.yaml").read_text()
    said = {line.split(": ")[0].strip(): int(line.split(": ")[1]) for line in plan.splitlines() if "0>" in line}
    assert all(one["wire_bytes"] == said for one in records(tmp_path / "whole", "step"))
    pool.run("run.jobs:train", 3, folder=str(tmp_path / "parts"), until=3, **given)
    again = pool.run("run.jobs:train", 3, folder=str(tmp_path / "parts"), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in found]


@pytest.mark.parametrize("exchange", [EXCHANGES[0], EXCHANGES[2]], ids=json.dumps)
def test_a_stopped_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, exchange: Any) -> None:
    given = {"steps": 8, "dropout": 0.1, "sections": sections("zero1", exchange)}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), until=4, **given)
    again = pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


@pytest.mark.parametrize(
    ("before", "ranks", "after"), [("zero1", 3, "zero1"), ("zero1", 1, "whole"), ("whole", 2, "zero1")]
)
def test_states_fit_other_ranks_and_other_shardings(
    pool: Pool, tmp_path: Path, before: str, ranks: int, after: str
) -> None:
    straight = pool.run("run.jobs:train", 1, folder=str(tmp_path / "straight"), steps=8, values=True)
    folder = str(tmp_path / "parts")
    pool.run("run.jobs:train", 2, folder=folder, steps=8, until=4, sections=sections(before))
    given = {"folder": folder, "steps": 8, "resume": True, "values": True, "fresh_plan": True}
    again = pool.run("run.jobs:train", ranks, sections=sections(after), **given)
    assert torch.allclose(torch.tensor(again[0]["values"]), torch.tensor(straight[0]["values"]), rtol=1e-5, atol=1e-6)


def test_hosts_with_disks_of_their_own(pool: Pool, tmp_path: Path) -> None:
    """No disk has all rows: each rank finds its own again, and no others."""
    given = {"steps": 8, "sections": sections("zero1")}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    apart = {"folder": str(tmp_path / "disk{rank}"), "disks": True, **given}
    pool.run("run.jobs:train", 2, until=4, **apart)
    again = pool.run("run.jobs:train", 2, resume=True, **apart)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]
    answers = pool.attempt("run.jobs:train", 1, resume=True, fresh_plan=True, **apart)
    assert "wanted rank 0 of 1" in answers[0]["error"]
    answers = pool.attempt(
        "run.jobs:train", 2, resume=True, fresh_plan=True, **{**apart, "sections": sections("whole")}
    )
    assert all("the plan.states that it was saved with" in one["error"] for one in answers)


def test_every_rank_holds_its_part_and_no_more(pool: Pool, tmp_path: Path) -> None:
    """Two moments of float32 for 1/n of the parameters, but for a row of each: as each rank writes them."""
    pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=2, sections=sections("zero1"))
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    held = [load_file(folder / f"rank-{rank:05d}.safetensors") for rank in range(3)]
    numel = [sum(t.numel() for name, t in one.items() if name.startswith("optim/")) for one in held]
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints", 2)
    shapes = [checkpoint.shape(name) for name in checkpoint.names() if name.startswith("optim/")]
    total, rows = sum(map(prod, shapes)), sum(prod(shape[1:]) for shape in shapes)
    assert sum(numel) == total
    assert all(abs(n - total / 3) <= rows for n in numel)


def test_parameters_of_fewer_rows_than_ranks(pool: Pool, tmp_path: Path) -> None:
    given = {"steps": 6, "kind": "thin", "values": True}
    plain = pool.run("run.jobs:train", 3, folder=str(tmp_path / "whole"), sections=sections("whole"), **given)
    ours = {"folder": str(tmp_path / "parts"), "sections": sections("zero1"), **given}
    pool.run("run.jobs:train", 3, until=3, **ours)
    again = pool.run("run.jobs:train", 3, resume=True, **ours)
    assert torch.allclose(torch.tensor(again[0]["values"]), torch.tensor(plain[0]["values"]), rtol=1e-6, atol=1e-6)
    assert all(one["digest"] == again[0]["digest"] for one in again)


def test_a_gradient_that_is_not_finite_is_seen_by_all(pool: Pool, tmp_path: Path) -> None:
    given = sections("zero1", on_nonfinite="skip")
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, bad=9, sections=given)
    assert found[0]["digest"] == found[1]["digest"]
    committed = [one["committed"] for one in records(tmp_path, "step")]
    assert not all(committed) and any(committed)


def test_half_parameters(pool: Pool, tmp_path: Path) -> None:
    """Parameters move by tenths here, and differ by what bf16 rounds where sums meet in another order."""
    fast = {"optimizer": {"adamw": {"lr": 0.05}}, "schedule": "constant"}
    found = {}
    for states, steps in (("none", 0), ("whole", 6), ("zero1", 6)):
        given = {"folder": str(tmp_path / states), "steps": max(1, steps), "kind": "halves", "values": True}
        rate = fast if steps else {"optimizer": {"adamw": {"lr": 1e-9}}}
        found[states] = pool.run("run.jobs:train", 2, sections=sections(states if steps else "whole", **rate), **given)
    start, plain, ours = (torch.tensor(one[0]["values"]) for one in found.values())
    assert found["zero1"][0]["digest"] == found["zero1"][1]["digest"]
    assert (ours - plain).norm() < 0.02 * (plain - start).norm()


BAD = [
    ({"plan": {"states": "zero1", "sync": "diloco"}}, "plan.states: wanted whole replicas that meet at every step"),
    ({"plan": {"states": "zero1", "mesh": {"pipe": 2}}}, "plan.states: wanted whole replicas that meet at every step"),
    ({"plan": {"states": "zero1"}, "train": {"optimizer": "lamb"}}, "wanted a rule that moves each number by itself"),
    ({"plan": {"states": "zero1", "adapt": "l_greco"}}, "plan.states: wanted no policy"),
    ({"plan": {"exchange": {"momentum": "dense"}}}, "plan.exchange: wanted no clipping around the exchange `momentum`"),
    ({"plan": {"states": "zero9"}}, "no sharding is called 'zero9'"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_input(pool: Pool, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=4, sections=given)
    assert all(one["kind"] == "BadInput" for one in answers), answers
    assert said in answers[0]["error"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_rows_are_dealt_out_once(ranks: int) -> None:
    for name, shape in {"w": (17, 9), "b": (9,), "scalar": (), "one": (1, 4), "none": (0, 3)}.items():
        rows = memory.rows_of(name, shape, ranks)
        assert len(rows) == ranks
        assert sum(one.count for one in rows) == (shape[0] if shape else 1)
        at = 0
        for one in rows:
            assert one.count == 0 or one.start == at
            at += one.count
