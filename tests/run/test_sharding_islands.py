"""Sharded states on islands, as whole runs over gloo: the same training in two hops, or with all states on each."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gossamer.store.checkpoint import open_checkpoint
from pool import Pool
from run.test_sharding import records

PLAIN = {"weights": None, "gradients": None, "intra_gradients": None}
INSIDE: dict[str, Any] = {"zero1": {"shard_group": "island"}}
WEIGHTS: dict[str, Any] = {"zero3": {"weights_group": "island"}}
ISLAND: dict[str, Any] = {"zero3": {"weights_group": "island", "states_group": "island"}}
EXACT: list[Any] = [
    *("zero1", "zero2", "zero3", INSIDE, {"zero2": {"shard_group": "island"}}, WEIGHTS, ISLAND),
    *({"sdp4bit": PLAIN}, {"sdp4bit": PLAIN | {"shard_group": "island"}}),
]
SEPARATE: list[Any] = [
    pytest.param({"sdp4bit": PLAIN | {"weights": "int8"}}, marks=pytest.mark.nightly),
    {"sdp4bit": PLAIN | {"gradients": "int4"}},
    {"sdp4bit": PLAIN | {"intra_gradients": "int8"}},
    {"sdp4bit": {"shard_group": "island"}},
    "zeropp",
]


def sections(states: Any, exchange: Any = "dense", islands: Any = ((0, 1), (2, 3)), **train: Any) -> dict[str, Any]:
    return {
        "plan": {"sharding": states, "exchange": exchange},
        "machines": {"islands": [list(i) for i in islands] if islands else "auto"},
        "train": train,
    }


def check_bytes(folder: Path) -> dict[str, int]:
    """What rank 0 sent by link is what the plan had said, at every step; it."""
    plan = yaml.safe_load((folder / "run" / "plan.yaml").read_text())
    said = {link: n for link, n in plan["forecast"]["wire_bytes"].items() if link.startswith("0>")}
    for one in records(folder, "step"):
        assert one["wire_bytes"] == said
    return said


@pytest.mark.parametrize(
    "islands",
    [((0, 1), (2, 3)), pytest.param(((0, 2, 3), (1,)), marks=pytest.mark.nightly)],
    ids=["2+2", "3+1"],
)
def test_it_is_plain_data_parallelism(pool: Pool, tmp_path: Path, islands: Any) -> None:
    """Clipped steps, dropout, tied weights, unequal rows: to 1e-6, norms too; bit for bit on all ranks."""
    given = {"steps": 6, "dropout": 0.1, "values": True}
    plain = pool.run("run.jobs:train", 4, folder=str(tmp_path / "none"), sections=sections("none"), **given)
    norms = [one["grad_norm"] for one in records(tmp_path / "none", "step")]
    for number, states in enumerate(EXACT):
        folder = tmp_path / str(number)
        found = pool.run("run.jobs:train", 4, folder=str(folder), sections=sections(states, islands=islands), **given)
        assert all(one["digest"] == found[0]["digest"] for one in found)
        ours, wanted = (torch.tensor(one[0]["values"]) for one in (found, plain))
        assert torch.allclose(ours, wanted, rtol=1e-6, atol=1e-6), states
        assert [one["grad_norm"] for one in records(folder, "step")] == pytest.approx(norms, rel=1e-5)
        check_bytes(folder)


@pytest.mark.parametrize("states", SEPARATE, ids=str)
def test_every_component_alone_leaves_all_ranks_in_the_same_place(pool: Pool, tmp_path: Path, states: Any) -> None:
    """Also over a stop; what is sent was known before."""
    given = {"steps": 4, "sections": sections(states)}
    whole = pool.run("run.jobs:train", 4, folder=str(tmp_path / "none"), **given)
    assert all(one["digest"] == whole[0]["digest"] for one in whole)
    check_bytes(tmp_path / "none")
    pool.run("run.jobs:train", 4, folder=str(tmp_path / "parts"), until=2, **given)
    again = pool.run("run.jobs:train", 4, folder=str(tmp_path / "parts"), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


@pytest.mark.parametrize("states", [pytest.param("zero1", marks=pytest.mark.nightly), INSIDE], ids=str)
def test_feedback_between_islands(pool: Pool, tmp_path: Path, states: Any) -> None:
    """What is written of hierarchical is done on the way to the owners; residuals go over a stop."""
    between = {"hierarchical": {"inter": {"error_feedback": {"two_shot": "int8"}}, "intra_codec": "bfloat16"}}
    given = {"steps": 4, "sections": sections(states, between)}
    whole = pool.run("run.jobs:train", 4, folder=str(tmp_path / "none"), **given)
    check_bytes(tmp_path / "none")
    pool.run("run.jobs:train", 4, folder=str(tmp_path / "parts"), until=2, **given)
    again = pool.run("run.jobs:train", 4, folder=str(tmp_path / "parts"), resume=True, **given)
    assert {one["digest"] for one in (*whole, *again)} == {whole[0]["digest"]}


def test_states_of_an_island_are_written_once_and_fit_other_ways(pool: Pool, tmp_path: Path) -> None:
    """By the first island; the checkpoint goes on with states over all ranks, or whole, or on fewer ranks."""
    straight = pool.run("run.jobs:train", 1, folder=str(tmp_path / "straight"), steps=6, values=True)
    folder = tmp_path / "parts"
    pool.run("run.jobs:train", 4, folder=str(folder), steps=6, until=2, sections=sections(INSIDE))
    there = folder / "run" / "checkpoints" / "step-00000002"
    held = [load_file(there / f"rank-{rank:05d}.safetensors") for rank in range(4)]
    numel = [sum(t.numel() for name, t in one.items() if name.startswith("optim/")) for one in held]
    checkpoint = open_checkpoint(folder / "run" / "checkpoints", 2)
    total = sum(prod(checkpoint.shape(name)) for name in checkpoint.names() if name.startswith("optim/"))
    assert sum(numel[:2]) == total and numel[2:] == [0, 0]
    given = {"folder": str(folder), "resume": True, "fresh_plan": True}
    pool.run("run.jobs:train", 4, steps=6, until=4, sections=sections("zero1"), **given)
    pool.run("run.jobs:train", 4, steps=6, until=5, sections=sections(INSIDE, islands=((0, 2, 3), (1,))), **given)
    again = pool.run("run.jobs:train", 2, steps=6, values=True, sections=sections("none", islands=()), **given)
    ours, wanted = (torch.tensor(one[0]["values"]) for one in (again, straight))
    assert torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "states", [WEIGHTS, pytest.param(ISLAND, marks=pytest.mark.nightly)], ids=["weights", "states"]
)
def test_parameters_of_an_island_in_micro_batches(pool: Pool, tmp_path: Path, states: Any) -> None:
    """Clipped, of ranks of unequal parts, with frozen ones among them, checkpointed regions, and an evaluation between:
    as with whole ones, and all that is sent was known before.
    """
    found, losses = {}, {}
    for name, written in (("none", "none"), ("parts", states)):
        given = sections(written, accumulate=2, batch=18, evaluate_every=2, evaluate_sequences=7)
        given["plan"]["batch_fractions"] = [2.0, 1.0, 1.0, 1.0]
        run = {"folder": str(tmp_path / name), "steps": 4, "kind": "habits", "frozen": ["layers.0", "layers.2.gate"]}
        found[name] = pool.run("run.jobs:train", 4, sections=given, values=True, **run)
        losses[name] = [one["loss"] for one in records(tmp_path / name, "evaluation")]
    assert all(one["digest"] == found["parts"][0]["digest"] for one in found["parts"])
    ours, plain = (torch.tensor(found[name][0]["values"]) for name in ("parts", "none"))
    assert torch.allclose(ours, plain, rtol=1e-6, atol=1e-6)
    assert losses["parts"] == pytest.approx(losses["none"], rel=1e-6) and len(losses["none"]) == 2
    check_bytes(tmp_path / "parts")


def test_the_partition_is_what_the_formulas_say(pool: Pool, tmp_path: Path) -> None:
    """Of d numbers on m islands of k ranks, what rank 0 puts on the slow line in a step: 4 (m-1)/m d/k bytes of
    gradients and as many of weights, or twice as many of gradients; over all ranks gradients for every rank behind it,
    and the weights of other ranks' rings. What each rank keeps between two steps: 4/k + 12/(km) bytes a parameter,
    16/k, and 16/(km).
    """
    crossing, held, k, m = {}, {}, 2, 2
    for name, states in (("all", "zero3"), ("weights", WEIGHTS), ("states", ISLAND)):
        given = {"folder": str(tmp_path / name), "steps": 3, "kind": "wide", "counts": True}
        ran = pool.run("run.jobs:train", k * m, sections=sections(states), **given)
        sent = check_bytes(tmp_path / name)
        crossing[name] = sum(n for link, n in sent.items() if link in ("0>2", "0>3"))
        plan = yaml.safe_load((tmp_path / name / "run" / "plan.yaml").read_text())
        held[name] = plan["forecast"]["state_bytes"]
        assert [one["bytes"][-1] for one in ran] == pytest.approx(held[name], rel=0.02)  # there are data too
    d = sum(held["all"]) // 16
    assert crossing["weights"] == 2 * 4 * (m - 1) / m * d / k
    assert crossing["states"] == pytest.approx(2 * 4 * (m - 1) / m * d / k, rel=1e-3)  # gloo's ring has its chunks
    assert crossing["all"] == 4 * (m - 1) / m * d
    for name, each in (("all", 16 / (k * m)), ("weights", 4 / k + 12 / (k * m)), ("states", 16 / k)):
        assert held[name] == [each * d] * (k * m)


ISLANDS_OF = {
    "2+2": pytest.param(((0, 1), (2, 3)), marks=pytest.mark.nightly),
    "3+2": ((0, 1, 2), (3, 4)),
}


@pytest.mark.parametrize("islands", ISLANDS_OF.values(), ids=ISLANDS_OF)
def test_parameters_of_an_island_go_on_after_a_stop(pool: Pool, tmp_path: Path, islands: Any) -> None:
    """Bit for bit, with what an exchange owes too, on one disk and on disks of their own. The first island writes all
    of them once, and every owner its rows of the states.
    """
    ranks = sum(map(len, islands))
    feedback = {"hierarchical": {"inter": {"error_feedback": {"two_shot": "int8"}}}}
    given = {"steps": 4, "dropout": 0.1, "values": True, "sections": sections(WEIGHTS, feedback, islands)}
    whole = pool.run("run.jobs:train", ranks, folder=str(tmp_path / "none"), **given)
    for name, more in (("parts", {}), ("disk{rank}", {"disks": True})):
        folder = str(tmp_path / name)
        pool.run("run.jobs:train", ranks, folder=folder, until=2, **more, **given)
        again = pool.run("run.jobs:train", ranks, folder=folder, resume=True, **more, **given)
        assert {one["digest"] for one in again} == {whole[0]["digest"]}
    checkpoint = open_checkpoint(tmp_path / "parts" / "run" / "checkpoints", 2)
    held = [load_file(checkpoint.folder / f"rank-{rank:05d}.safetensors") for rank in range(ranks)]
    owners = {rank for island in islands for rank in island[:2]}
    for start, writers in (("model/", set(islands[0][:2])), ("optim/", owners)):
        names = [n for n in checkpoint.names() if n.startswith(start) and not n.endswith("seen")]
        numel = [sum(t.numel() for n, t in one.items() if n.startswith(start) and "seen" not in n) for one in held]
        assert sum(numel) == sum(prod(checkpoint.shape(name)) for name in names)
        assert {rank for rank, n in enumerate(numel) if n} == writers


def test_parameters_of_an_island_fit_other_ways(pool: Pool, tmp_path: Path) -> None:
    straight = pool.run("run.jobs:train", 1, folder=str(tmp_path / "straight"), steps=8, values=True)
    given = {"folder": str(tmp_path / "parts"), "fresh_plan": True, "steps": 8}
    pool.run("run.jobs:train", 4, until=2, sections=sections(WEIGHTS), **given)
    for ranks, until, states, islands in (
        (4, 3, ISLAND, ((0, 1), (2, 3))),
        (4, 4, "zero3", ()),
        (4, 5, WEIGHTS, ((0, 2, 3), (1,))),
        (3, 6, "zero1", ()),
        (4, 7, WEIGHTS, ((0, 1), (2, 3))),
    ):
        pool.run("run.jobs:train", ranks, resume=True, until=until, sections=sections(states, islands=islands), **given)
    again = pool.run("run.jobs:train", 2, resume=True, values=True, sections=sections("none", islands=()), **given)
    ours, wanted = (torch.tensor(one[0]["values"]) for one in (again, straight))
    assert torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6)


def test_an_exchange_over_islands_alone_is_forecast_too(pool: Pool, tmp_path: Path) -> None:
    pool.run("run.jobs:train", 4, folder=str(tmp_path), steps=2, sections=sections("none", {"hierarchical": "dense"}))
    check_bytes(tmp_path)


EDGES = {
    "1+1": ((0,), (1,)),
    "3": ((0, 1, 2),),
    "2+2": pytest.param(((0, 1), (2, 3)), marks=pytest.mark.nightly),
}


@pytest.mark.parametrize("islands", EDGES.values(), ids=EDGES)
def test_parameters_of_an_island_at_the_edges(pool: Pool, tmp_path: Path, islands: Any) -> None:
    """Islands of one rank, one island, parameters of fewer rows than ranks; and half ones, which differ by what bf16
    rounds where sums meet in another order.
    """
    rates: dict[str, Any] = {"thin": {}, "halves": {"optimizer": {"adamw": {"lr": 0.05}}, "lr_schedule": "constant"}}
    still = {"optimizer": {"adamw": {"lr": 1e-9}}}
    found = {}
    for kind, states, train in (
        *((kind, states, rates[kind]) for kind in rates for states in ("none", "weights")),
        ("halves", "still", still),
    ):
        given = sections(WEIGHTS if states == "weights" else "none", islands=islands, **train)
        run = {"folder": str(tmp_path / kind / states), "steps": 4, "kind": kind, "values": True}
        ran = pool.run("run.jobs:train", sum(map(len, islands)), sections=given, **run)
        assert all(one["digest"] == ran[0]["digest"] for one in ran)
        found[kind, states] = torch.tensor(ran[0]["values"])
    check_bytes(tmp_path / "thin" / "weights")
    assert torch.allclose(found["thin", "weights"], found["thin", "none"], rtol=1e-6, atol=1e-6)
    ours, plain, start = (found["halves", states] for states in ("weights", "none", "still"))
    assert (ours - plain).norm() < 0.02 * (plain - start).norm()


def test_parameters_go_by_islands_that_links_show(pool: Pool, tmp_path: Path) -> None:
    """As by those that are given; what is sent is known anew. Over all ranks nobody asks the links."""
    digests = {}
    for states, name in ((WEIGHTS, "weights"), ("zero3", "all")):
        given = {"steps": 2, "folder": str(tmp_path / name), "sections": sections(states, islands=())}
        found = pool.run("run.jobs:train_behind", 4, islands=[[0, 2], [1, 3]], **given)
        digests[name] = {one["digest"] for one in found}
        check_bytes(tmp_path / name)
        plan = yaml.safe_load((tmp_path / name / "run" / "plan.yaml").read_text())
        assert plan["islands"] == ([[0, 2], [1, 3]] if name == "weights" else [])
    given = {"steps": 2, "sections": sections(WEIGHTS, islands=((0, 2), (1, 3)))}
    ran = pool.run("run.jobs:train", 4, folder=str(tmp_path / "given"), **given)
    assert {one["digest"] for one in ran} == digests["weights"]


@pytest.mark.parametrize("states", [INSIDE, WEIGHTS], ids=["states", "weights"])
def test_links_that_are_all_alike_have_no_islands(pool: Pool, tmp_path: Path, states: Any) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=2, sections=sections(states, islands=()))
    assert all(one["kind"] == "BadInput" for one in answers), answers
    assert "plan.sharding: wanted islands of ranks, as each island holds all states" in answers[0]["error"]
