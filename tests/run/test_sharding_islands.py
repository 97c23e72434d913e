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

PLAIN = {"weights": None, "gradients": None, "gradients_inside": None}
INSIDE: dict[str, Any] = {"zero1": {"level": "island"}}
EXACT: list[Any] = ["zero1", INSIDE, {"sdp4bit": PLAIN}, {"sdp4bit": PLAIN | {"level": "island"}}]
SEPARATE: list[Any] = [
    {"sdp4bit": PLAIN | {"weights": "int8"}},
    {"sdp4bit": PLAIN | {"gradients": "int4"}},
    {"sdp4bit": PLAIN | {"gradients_inside": "int8"}},
    {"sdp4bit": {"level": "island"}},
    "zeropp",
]


def sections(states: Any, exchange: Any = "dense", islands: Any = ((0, 1), (2, 3)), **train: Any) -> dict[str, Any]:
    return {
        "plan": {"states": states, "exchange": exchange},
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


@pytest.mark.parametrize("islands", [((0, 1), (2, 3)), ((0, 2, 3), (1,))], ids=["2+2", "3+1"])
def test_it_is_plain_data_parallelism(pool: Pool, tmp_path: Path, islands: Any) -> None:
    """Clipped steps, dropout, tied weights, unequal rows: to 1e-6, norms too; bit for bit on all ranks."""
    given = {"steps": 6, "dropout": 0.1, "values": True}
    plain = pool.run("run.jobs:train", 4, folder=str(tmp_path / "whole"), sections=sections("whole"), **given)
    norms = [one["grad_norm"] for one in records(tmp_path / "whole", "step")]
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
    whole = pool.run("run.jobs:train", 4, folder=str(tmp_path / "whole"), **given)
    assert all(one["digest"] == whole[0]["digest"] for one in whole)
    check_bytes(tmp_path / "whole")
    pool.run("run.jobs:train", 4, folder=str(tmp_path / "parts"), until=2, **given)
    again = pool.run("run.jobs:train", 4, folder=str(tmp_path / "parts"), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


@pytest.mark.parametrize("states", ["zero1", INSIDE], ids=str)
def test_feedback_between_islands(pool: Pool, tmp_path: Path, states: Any) -> None:
    """What is written of hierarchical is done on the way to the owners; residuals go over a stop."""
    between = {"hierarchical": {"between": {"error_feedback": {"two_shot": "int8"}}, "inside": "bfloat16"}}
    given = {"steps": 4, "sections": sections(states, between)}
    whole = pool.run("run.jobs:train", 4, folder=str(tmp_path / "whole"), **given)
    check_bytes(tmp_path / "whole")
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
    again = pool.run("run.jobs:train", 2, steps=6, values=True, sections=sections("whole", islands=()), **given)
    ours, wanted = (torch.tensor(one[0]["values"]) for one in (again, straight))
    assert torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6)


def test_an_exchange_over_islands_alone_is_forecast_too(pool: Pool, tmp_path: Path) -> None:
    pool.run("run.jobs:train", 4, folder=str(tmp_path), steps=2, sections=sections("whole", {"hierarchical": "dense"}))
    check_bytes(tmp_path)


def test_links_that_are_all_alike_have_no_islands(pool: Pool, tmp_path: Path) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=2, sections=sections(INSIDE, islands=()))
    assert all(one["kind"] == "BadInput" for one in answers), answers
    assert "plan.states: wanted islands of ranks, to hold the states on each of them" in answers[0]["error"]
