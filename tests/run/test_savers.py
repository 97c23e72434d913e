"""Whole runs that recompute or swap, beside the same runs without: the same weights, bit for bit."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.model.origin import origin_of
from gossamer.partition.plan_file import make_plan
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput
from pool import Pool
from run.adapter_jobs import HEADS, SIZES
from run.test_tiers import combined

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "zero1": (2, {"sharding": "zero1"}),
    "zero2": (2, {"sharding": "zero2"}),
    "zero3": (2, {"sharding": "zero3"}),
    "islands": (2, {"sync": {"local_sgd": {"sync_every": 2}}, "exchange": "dense"}),
    "stages": (2, {"mesh": {"pipe": 2}, "cuts": ["embed", "layers.1"]}),
}
SPLIT = {"pipeline_schedule": {"split_backward": {"inner": "gpipe"}}}  # a backward in two parts
MORE: dict[str, tuple[int, dict[str, Any]]] = {**LAYOUTS, "split": (2, {**LAYOUTS["stages"][1], **SPLIT})}


BY_NIGHT = ("zero1", "zero2")  # "zero3" shards these states as well
each_layout = [pytest.param(one, marks=[pytest.mark.nightly] if one in BY_NIGHT else []) for one in LAYOUTS]


@pytest.mark.parametrize("layout", each_layout)
def test_a_run_that_recomputes_is_the_run_that_does_not(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Clipped steps, dropout, tied weights, micro-batches, rows without a label."""
    ranks, plan = LAYOUTS[layout]
    found = []
    for savers in ([], ["recompute"]):
        sections = {"plan": {"exchange": "dense", **plan, "savers": savers}, "train": {"accumulate": 2}}
        folder = str(tmp_path / str(len(found)))
        found.append(pool.run("run.jobs:train", ranks, folder=folder, steps=4, dropout=0.1, sections=sections))
    assert [one["digest"] for one in found[0]] == [one["digest"] for one in found[1]]
    assert [one["held"] for one in found[0]] == [one["held"] for one in found[1]]
    assert not any(one["ended"] for run in found for one in run)
    assert "recompute" in (tmp_path / "1" / "run" / "plan.yaml").read_text()


def swap(folder: Path, **settings: Any) -> dict[str, Any]:
    given = {"host": "4MiB", "file": "16MiB", "directory": str(folder / "swap"), "least": 1}
    return {"activation_swap": {**given, **settings}}


@pytest.mark.parametrize(
    ("layout", "units"),
    combined(
        [*MORE, "tiers"],
        ["auto", "all"],
        by_day=[
            ("one process", "auto"),
            ("zero2", "auto"),
            ("zero3", "all"),
            ("islands", "auto"),
            ("stages", "all"),
            ("tiers", "auto"),
        ],
    ),
)
def test_a_run_that_swaps_is_the_run_that_does_not(pool: Pool, tmp_path: Path, layout: str, units: str) -> None:
    """Clipped steps, dropout, tied weights, micro-batches, rows without a label; beside states in tiers as well."""
    sizes = {"device": "64MB", "host": "64MB", "file": "64MB"}
    found = []
    for savers in ([], [swap(tmp_path, units=units)]):
        folder = tmp_path / str(len(found))
        tiers = {"sharding": {"tiers": {**sizes, "directory": str(folder / "tiers")}}}
        ranks, plan = (1, tiers) if layout == "tiers" else MORE[layout]
        sections = {"plan": {"exchange": "dense", **plan, "savers": savers}, "train": {"accumulate": 2}}
        found.append(pool.run("run.jobs:train", ranks, folder=str(folder), steps=4, dropout=0.1, sections=sections))
    assert [one["digest"] for one in found[0]] == [one["digest"] for one in found[1]]
    assert not any(one["ended"] for run in found for one in run)
    assert "units swap" in (tmp_path / "1" / "run" / "records.jsonl").read_text()
    assert not list((tmp_path / "swap").iterdir())


@pytest.mark.parametrize(
    ("beside", "wanted"),
    [
        ({"plan": {"sync": "just_one_byte"}, "train": {"optimizer": {"sgd": {"lr": 1e-4}}}}, "a backward pass"),
        ({"savers": ["recompute"]}, "activation_swap without recompute"),
        ({"savers": ["fp8_activations"]}, "activation_swap without fp8_activations"),
    ],
)
def test_what_swapping_does_not_go_with_is_refused_by_name(tmp_path: Path, beside: dict[str, Any], wanted: str) -> None:
    savers = [swap(tmp_path), *beside.get("savers", ())]
    plan = {**beside.get("plan", {}), "savers": savers}
    config = RunConfig.model_validate({"plan": plan, "train": beside.get("train", {})})
    module = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(BadInput, match=wanted):
        make_plan(config, module, ranks=2, device=torch.device("cpu"))


def test_savers_in_an_order_that_does_not_work_are_told_the_one_that_does() -> None:
    module = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for savers in (["fp8_activations", "cut_cross_entropy"], ["cut_cross_entropy", "fp8_activations"]):
        config = RunConfig.model_validate({"plan": {"savers": savers}})
        with pytest.raises(BadInput, match="write cut_cross_entropy first") if savers[0][0] == "f" else nullcontext():
            make_plan(config, module, ranks=1, device=torch.device("cpu"))


@pytest.mark.parametrize("layout", [*each_layout, pytest.param("split", marks=pytest.mark.nightly)])
def test_a_run_in_tiles_is_nearly_the_run_that_is_not(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Of SGD: AdamW divides rounding errors by rounding errors where gradients are 0."""
    ranks, plan = MORE[layout]
    found = []
    for savers in ([], [{"tiling": {"linears": "*", "tiles": 3}}]):
        train = {"accumulate": 2, "optimizer": {"sgd": {"lr": 0.1}}}
        sections = {"plan": {"exchange": "dense", **plan, "savers": savers}, "train": train}
        folder = str(tmp_path / str(len(found)))
        given = {"folder": folder, "steps": 4, "dropout": 0.1, "values": True, "sections": sections}
        found.append(pool.run("run.jobs:train", ranks, **given))
    for plain, ours in zip(*found, strict=True):
        assert torch.allclose(torch.tensor(plain["values"]), torch.tensor(ours["values"]), rtol=1e-5, atol=1e-6)
        assert plain["digest"] != ours["digest"], "sums in another order"
    assert "linear layers run in 3 tiles" in (tmp_path / "1" / "run" / "records.jsonl").read_text()


@pytest.mark.parametrize("saver", [pytest.param("auto", marks=pytest.mark.nightly), "all", "tiling"])
def test_a_model_with_an_adapter_trains_as_without_savers(pool: Pool, tmp_path: Path, saver: str) -> None:
    """LoRA with dropout on a frozen Llama: of its own layers no gradient of a weight is made."""
    config = {**SIZES, **HEADS}
    base = origin_of(ModelSection(hf="llama", config=config)).build(1)  # type: ignore[arg-type]
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    tiles = {"tiling": {"linears": "*_proj.base_layer", "tiles": 3}}
    given = {"base": str(tmp_path / "base"), "adapter": {"lora": {"dropout": 0.2}}, "steps": 4}
    for name, savers in (("0", []), ("1", [tiles if saver == "tiling" else swap(tmp_path, units=saver)])):
        sections = {"plan": {"savers": savers}, "train": {"accumulate": 2}}
        pool.run("run.adapter_jobs:train", 1, folder=str(tmp_path / name), sections=sections, **given)
    lines = [[json.loads(line) for line in (tmp_path / name / "records.jsonl").open()] for name in "01"]
    found = [[one["loss"] for one in each if one["kind"] == "step"] for each in lines]
    assert len(found[0]) == 4
    assert found[1] == (pytest.approx(found[0], rel=1e-5) if saver == "tiling" else found[0])


@pytest.mark.parametrize("layout", ["zero3", "stages", pytest.param("split", marks=pytest.mark.nightly)])
def test_inputs_kept_in_8_bits_are_those_of_one_process(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Of micro-batches with the same rows: what is coded is the same in any layout."""
    found = []
    for where, savers in (("one process", True), (layout, True), (layout, False)):
        ranks, plan = MORE[where]
        plan = {"exchange": "dense", **plan, "savers": [{"fp8_activations": {"least": 1}}] if savers else []}
        sections = {"plan": plan, "train": {"accumulate": 8 // ranks if layout == "zero3" else 4}}
        folder = tmp_path / str(len(found))
        pool.run("run.jobs:train", ranks, folder=str(folder), steps=3, kind="wide", sections=sections)
        lines = (folder / "run" / "records.jsonl").read_text().splitlines()
        found.append([each["loss"] for each in map(json.loads, lines) if each["kind"] == "step"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[1] != found[2], "something is coded"
