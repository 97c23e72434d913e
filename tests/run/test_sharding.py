"""Sharded states, as whole runs: the same training with a part of the update rule's state on every rank."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from gossamer import sharding as sharding_methods
from gossamer.run.checkpoint import read_model
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool

ZERO = ("zero1", "zero2", "zero3")
EXCHANGES: list[Any] = [
    "dense",
    {"two_shot": {"codec": "bfloat16"}},
    {"error_feedback": {"two_shot": {"codec": "int8"}}},
    {"error_feedback": {"topk": {"fraction": 0.1}}},
]


def sections(states: Any, exchange: Any = "dense", **train: Any) -> dict[str, dict[str, Any]]:
    return {"plan": {"sharding": states, "exchange": exchange}, "train": train}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


@pytest.mark.parametrize("ranks", [1, 3])  # of two it is among the references
def test_it_is_plain_data_parallelism(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Clipped and unclipped steps, dropout, tied weights, unequal rows: equal to 1e-6, on all ranks bit for bit."""
    found, norms = {}, {}
    for states in ("none", *ZERO):
        given = {"folder": str(tmp_path / states), "steps": 6, "dropout": 0.1, "values": True}
        found[states] = pool.run("run.jobs:train", ranks, sections=sections(states), **given)
        norms[states] = [one["grad_norm"] for one in records(tmp_path / states, "step")]
    for states in ZERO:
        assert all(one["digest"] == found[states][0]["digest"] for one in found[states])
        ours, plain = (torch.tensor(found[one][0]["values"]) for one in (states, "none"))
        assert torch.allclose(ours, plain, rtol=1e-6, atol=1e-6)
        assert norms[states] == pytest.approx(norms["none"], rel=1e-5)


def test_a_class_of_torch_is_itself_where_its_states_are_sharded(pool: Pool, tmp_path: Path) -> None:
    """Also over a stop, and on another number of ranks."""
    given = {"steps": 6, "values": True, "fresh_plan": True}
    nadam = {"optimizer": {"from_class": {"path": "torch.optim:NAdam", "lr": 1e-2, "arguments": {"weight_decay": 0.1}}}}
    found = [pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), sections=sections("none", **nadam), **given)]
    for until, ranks, states in ((3, 2, "zero2"), (None, 3, "zero1")):
        stop = {"until": until} if until else {"resume": True}
        folder = str(tmp_path / "parts")
        found.append(
            pool.run("run.jobs:train", ranks, folder=folder, sections=sections(states, **nadam), **stop, **given)
        )
    ours, plain = (torch.tensor(one[0]["values"]) for one in (found[-1], found[0]))
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)
    assert "torch.optim:NAdam: that ranks" in (tmp_path / "one" / "run" / "plan.yaml").read_text()


@pytest.mark.parametrize(
    "exchange", [EXCHANGES[0], pytest.param(EXCHANGES[1], marks=pytest.mark.nightly), *EXCHANGES[2:]], ids=json.dumps
)
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


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_codes_bring_what_they_bring_without_sharding(pool: Pool, tmp_path: Path, codec: str) -> None:
    """One step of SGD: the mean gradient, but for what the code loses."""
    found = {}
    sgd = {"optimizer": {"sgd": {"lr": 1.0}}, "lr_schedule": "constant", "max_grad_norm": 0.0}
    for states, exchange in (("none", "dense"), ("zero1", {"two_shot": {"codec": codec}})):
        given = {"folder": str(tmp_path / states), "steps": 1, "values": True}
        found[states] = pool.run("run.jobs:train", 3, sections=sections(states, exchange, **sgd), **given)[0]["values"]
    off = (torch.tensor(found["zero1"]) - torch.tensor(found["none"])).abs()
    limit = {"float32": 1e-6, "bfloat16": 2**-8, "int8": 2**-6}[codec]  # of gradients below 1
    assert off.max() < limit


def test_dense_sends_what_an_all_reduce_does(pool: Pool, tmp_path: Path) -> None:
    sent = {}
    for states in ("none", "zero1"):
        folder = tmp_path / states
        pool.run("run.jobs:train", 2, folder=str(folder), steps=2, sections=sections(states))
        sent[states] = sum(records(folder, "step")[0]["wire_bytes"].values())
    assert sent["zero1"] == pytest.approx(sent["none"], rel=0.03)


@pytest.mark.parametrize(
    "exchange",
    [EXCHANGES[0], *(pytest.param(one, marks=pytest.mark.nightly) for one in EXCHANGES[1:3]), EXCHANGES[3]],
    ids=json.dumps,
)
def test_differences_in_four_bits_leave_all_ranks_in_the_same_place(pool: Pool, tmp_path: Path, exchange: Any) -> None:
    """Also over a stop: the float32 rows are kept, and what is sent was known before."""
    given = {"steps": 6, "sections": sections("sdp4bit", exchange)}
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path / "none"), **given)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    plan = (tmp_path / "none" / "run" / "plan.yaml").read_text()
    said = {line.split(": ")[0].strip(): int(line.split(": ")[1]) for line in plan.splitlines() if "0>" in line}
    assert all(one["wire_bytes"] == said for one in records(tmp_path / "none", "step"))
    pool.run("run.jobs:train", 3, folder=str(tmp_path / "parts"), until=3, **given)
    again = pool.run("run.jobs:train", 3, folder=str(tmp_path / "parts"), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in found]


STOPPED = [
    ("zero1", EXCHANGES[0]),
    ("zero2", EXCHANGES[2]),
    ("zero3", EXCHANGES[2]),
    pytest.param("zero1", EXCHANGES[2], marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("states", "exchange"), STOPPED, ids=json.dumps)
def test_a_stopped_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, states: str, exchange: Any) -> None:
    given = {"steps": 8, "dropout": 0.1, "sections": sections(states, exchange)}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "none"), **given)
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), until=4, **given)
    again = pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


WHOLE: dict[str, Any] = {"zero1": {"whole": True}}
OTHERS: list[Any] = [
    ("zero1", 3, "zero1"),
    pytest.param("zero1", 1, "none", marks=pytest.mark.nightly),
    pytest.param("none", 2, "zero1", marks=pytest.mark.nightly),
    ("zero3", 3, "zero3"),
    ("zero3", 1, "none"),
    ("none", 2, "zero3"),
    ("zero3", 2, "zero2"),
    (WHOLE, 3, {"zero3": {"whole": True}}),
    pytest.param(WHOLE, 2, "zero2", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("before", "ranks", "after"), OTHERS)
def test_states_fit_other_ranks_and_other_shardings(
    pool: Pool, tmp_path: Path, before: Any, ranks: int, after: Any
) -> None:
    straight = pool.run("run.jobs:train", 1, folder=str(tmp_path / "straight"), steps=8, values=True)
    folder = str(tmp_path / "parts")
    pool.run("run.jobs:train", 2, folder=folder, steps=8, until=4, sections=sections(before))
    given = {"folder": folder, "steps": 8, "resume": True, "values": True, "fresh_plan": True}
    again = pool.run("run.jobs:train", ranks, sections=sections(after), **given)
    assert torch.allclose(torch.tensor(again[0]["values"]), torch.tensor(straight[0]["values"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("states", [pytest.param("zero1", marks=pytest.mark.nightly), "zero3"])
def test_hosts_with_disks_of_their_own(pool: Pool, tmp_path: Path, states: str) -> None:
    """No disk has all rows: each rank finds its own again, and no others."""
    given = {"steps": 8, "sections": sections(states)}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "none"), **given)
    apart = {"folder": str(tmp_path / "disk{rank}"), "disks": True, **given}
    pool.run("run.jobs:train", 2, until=4, **apart)
    again = pool.run("run.jobs:train", 2, resume=True, **apart)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]
    answers = pool.attempt("run.jobs:train", 1, resume=True, fresh_plan=True, **apart)
    assert "wanted rank 0 of 1" in answers[0]["error"]
    answers = pool.attempt("run.jobs:train", 2, resume=True, fresh_plan=True, **{**apart, "sections": sections("none")})
    assert all("the plan.sharding that it was saved with" in one["error"] for one in answers)
    if states == "zero3":
        with pytest.raises(CheckpointMismatch, match="holds sharded parameters rank by rank"):
            read_model(nn.Linear(1, 1), tmp_path / "disk0" / "run" / "checkpoints")


def test_every_rank_holds_its_part_and_no_more(pool: Pool, tmp_path: Path) -> None:
    """Two moments of float32 for 1/n of the parameters, but for a row of each: as each rank writes them."""
    for states, kept in (("zero1", ("optim/",)), ("zero3", ("optim/", "model/"))):
        pool.run("run.jobs:train", 3, folder=str(tmp_path / states), steps=2, sections=sections(states))
        checkpoint = open_checkpoint(tmp_path / states / "run" / "checkpoints", 2)
        files = [checkpoint.folder / f"rank-{rank:05d}.safetensors" for rank in range(3)]
        for start in kept:
            numel = [sum(t.numel() for name, t in load_file(one).items() if name.startswith(start)) for one in files]
            shapes = [checkpoint.shape(name) for name in checkpoint.names() if name.startswith(start)]
            total, rows = sum(map(prod, shapes)), sum(prod(shape[1:]) for shape in shapes)
            assert sum(numel) == total
            assert all(abs(n - total / 3) <= rows for n in numel)


def test_model_state_is_what_the_formula_says(pool: Pool, tmp_path: Path) -> None:
    """Between two steps, of everything that Python holds: n ranks keep 16, 8 + 8/n, 4 + 12/n, and 16/n bytes a
    parameter, and the plan knew.
    """
    found, said, ranks = {}, {}, 3
    for states in ("none", *ZERO):
        given = {"folder": str(tmp_path / states), "steps": 3, "kind": "wide", "counts": True}
        ran = pool.run("run.jobs:train", ranks, sections=sections(states), **given)
        found[states] = [one["bytes"][-1] for one in ran]
        plan = yaml.safe_load((tmp_path / states / "run" / "plan.yaml").read_text())
        said[states] = plan["forecast"]["state_bytes"]
    each = {"none": 16.0, "zero1": 8 + 8 / ranks, "zero2": 4 + 12 / ranks, "zero3": 16 / ranks}
    numel = said["none"][0] / 16
    for rank in range(ranks):
        for states in ("none", *ZERO):
            assert said[states][rank] == pytest.approx(each[states] * numel, rel=0.02)
            assert found[states][rank] == pytest.approx(said[states][rank], rel=0.02)  # there are data too


CASES = [
    {},
    {"frozen": ["layers.0", "layers.2.gate"]},
    {"frozen": ["embed", "layers.0", "layers.1"]},
]


@pytest.mark.parametrize("frozen", CASES, ids=json.dumps)
def test_what_models_do(pool: Pool, tmp_path: Path, frozen: dict[str, Any]) -> None:
    """Checkpointed regions, changes in place, records, losses on the side, parameters read elsewhere or never, in
    several micro-batches of unequal ranks, with an evaluation of unequal parts in between.
    """
    found, losses = {}, {}
    for states in ("none", "zero3"):
        given = sections(states, accumulate=2, batch=9, evaluate_every=2, evaluate_sequences=7)
        given["plan"]["batch_fractions"] = [2.0, 1.0]
        ran = {"folder": str(tmp_path / states), "steps": 4, "kind": "habits", "values": True, **frozen}
        found[states] = pool.run("run.jobs:train", 2, sections=given, **ran)
        losses[states] = [one["loss"] for one in records(tmp_path / states, "evaluation")]
    assert found["zero3"][0]["digest"] == found["zero3"][1]["digest"]
    ours, plain = (torch.tensor(found[states][0]["values"]) for states in ("zero3", "none"))
    assert torch.allclose(ours, plain, rtol=1e-6, atol=1e-6)
    assert losses["zero3"] == pytest.approx(losses["none"], rel=1e-6) and len(losses["none"]) == 2
    plan = yaml.safe_load((tmp_path / "zero3" / "run" / "plan.yaml").read_text())
    for one in records(tmp_path / "zero3", "step"):
        assert one["wire_bytes"]["0>1"] == plan["forecast"]["wire_bytes"]["0>1"]


def test_a_sharded_model_writes_as_the_whole_one_does(pool: Pool, tmp_path: Path) -> None:
    texts = {}
    for states in ("none", "zero3"):
        given = sections(states, sample_prompt="adg", sample_max_new_tokens=8, evaluate_every=2)
        pool.run("run.jobs:train", 2, folder=str(tmp_path / states), steps=4, kind="causal", sections=given)
        texts[states] = [one["text"] for one in records(tmp_path / states, "sample")]
    assert texts["zero3"] == texts["none"] and len(texts["none"]) == 2


@pytest.mark.parametrize("states", [pytest.param("zero1", marks=pytest.mark.nightly), "zero3"])
def test_parameters_of_fewer_rows_than_ranks(pool: Pool, tmp_path: Path, states: str) -> None:
    given = {"steps": 6, "kind": "thin", "values": True}
    plain = pool.run("run.jobs:train", 3, folder=str(tmp_path / "none"), sections=sections("none"), **given)
    ours = {"folder": str(tmp_path / "parts"), "sections": sections(states), **given}
    pool.run("run.jobs:train", 3, until=3, **ours)
    again = pool.run("run.jobs:train", 3, resume=True, **ours)
    assert torch.allclose(torch.tensor(again[0]["values"]), torch.tensor(plain[0]["values"]), rtol=1e-6, atol=1e-6)
    assert all(one["digest"] == again[0]["digest"] for one in again)


@pytest.mark.parametrize("states", ["zero1", "zero3"])
def test_a_gradient_that_is_not_finite_is_seen_by_all(pool: Pool, tmp_path: Path, states: str) -> None:
    given = sections(states, on_nonfinite="skip")
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, bad=9, sections=given)
    assert found[0]["digest"] == found[1]["digest"]
    committed = [one["committed"] for one in records(tmp_path, "step")]
    assert not all(committed) and any(committed)


def test_half_parameters(pool: Pool, tmp_path: Path) -> None:
    """Parameters move by tenths here, and differ by what bf16 rounds where sums meet in another order."""
    fast = {"optimizer": {"adamw": {"lr": 0.05}}, "lr_schedule": "constant"}
    found = {}
    for states, steps in (("still", 0), ("none", 6), ("zero1", 6), ("zero3", 6)):
        given = {"folder": str(tmp_path / states), "steps": max(1, steps), "kind": "halves", "values": True}
        rate = fast if steps else {"optimizer": {"adamw": {"lr": 1e-9}}}
        found[states] = pool.run("run.jobs:train", 2, sections=sections(states if steps else "none", **rate), **given)
    start, plain, *sharded = (torch.tensor(one[0]["values"]) for one in found.values())
    for states, ours in zip(("zero1", "zero3"), sharded, strict=True):
        assert found[states][0]["digest"] == found[states][1]["digest"]
        assert (ours - plain).norm() < 0.02 * (plain - start).norm()


BAD = [
    (
        {"plan": {"sharding": "zero1", "sync": "just_one_byte"}},
        "plan.sharding: wanted no pipeline stages and a gradient exchange at every step",
    ),
    (
        {"plan": {"sharding": "zero1", "mesh": {"pipe": 2}}},
        "plan.sharding: wanted no pipeline stages and a gradient exchange at every step",
    ),
    ({"plan": {"sharding": "zero1"}, "train": {"optimizer": "lamb"}}, "wanted an element-wise optimizer"),
    ({"plan": {"sharding": "zero1", "adapt": "l_greco"}}, "plan.sharding: wanted no policy"),
    (
        {"plan": {"exchange": {"momentum": "dense"}}},
        "plan.exchange: wanted no gradient clipping with the exchange `momentum`",
    ),
    (
        {"plan": {"sharding": "zero3", "batch_fractions": [7.0, 1.0]}, "data": {"sequence": 16384}},
        "micro-batches on every replica, as all gather sharded parameters together",
    ),
    (
        {"plan": {"sharding": "zero2"}, "train": {"verify": {"every": 2}}},
        "train.verify.every: wanted plan.sharding none",
    ),
    (
        {"plan": {"sharding": "zero3", "pipeline_schedule": "gpipe"}},
        "plan.sharding: wanted plan.pipeline_schedule single_stage",
    ),
    ({"plan": {"sharding": "zero9"}}, "no sharding is called 'zero9'"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_input(pool: Pool, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=4, sections=given)
    assert all(one["kind"] == "BadInput" for one in answers)
    assert said in answers[0]["error"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_rows_are_dealt_out_once(ranks: int) -> None:
    for name, shape in {"w": (17, 9), "b": (9,), "scalar": (), "one": (1, 4), "none": (0, 3)}.items():
        rows = sharding_methods.rows_of(name, shape, ranks)
        assert len(rows) == ranks
        assert sum(one.count for one in rows) == (shape[0] if shape else 1)
        at = 0
        for one in rows:
            assert one.count == 0 or one.start == at
            at += one.count
