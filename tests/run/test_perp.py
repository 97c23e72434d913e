"""PERP as whole runs: resumed, on other numbers of ranks and in stages, zeros stay and the steps are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.adapter import merge
from gossamer.model.origin import origin_of
from gossamer.prune import apply_masks, build, prune
from gossamer.recipe import check as recipe_check
from gossamer.run.checkpoint import read_model
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.store.start_folder import StartContent, start_state, write_start
from pool import Pool
from run.adapter_jobs import HEADS, SIZES, by_peft

pytest.importorskip("peft")
CONFIG = {**SIZES, **HEADS, "num_hidden_layers": 2}
STEPS = 4


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The start folder of a pruned Llama, and its masks."""
    folder = tmp_path_factory.mktemp("pruned") / "start"
    module = origin_of(ModelSection(hf="llama", config=CONFIG)).build(1)
    masks = dict(prune(module, build({"magnitude": {"pattern": "2:4"}})).masks)
    apply_masks(module, masks)
    tensors = {name: one.detach() for name, one in start_state(module)}
    write_start(folder, StartContent(tensors=tensors, method="magnitude", source="0", masks=masks))
    return folder, masks


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return [one for one in lines if one["kind"] == kind]


def check(folder: Path, start: tuple[Path, dict[str, Tensor]], adapter: str, steps: int = STEPS) -> None:
    """Compare the losses of a run with plain steps in one process, and look at the zeros of its merged model."""
    model = {"config": CONFIG, "start": str(start[0])}
    wanted, _ = by_peft("llama", adapter, steps, model=model)
    assert [one["loss"] for one in records(folder, "step")] == pytest.approx(wanted, rel=2e-5)
    assert abs(wanted[-1] - wanted[0]) > 1e-3
    origin = origin_of(ModelSection(hf="llama", adapter=adapter, **model))
    module: nn.Module = origin.build(0)
    read_model(module, folder / "checkpoints", origin.base_digest(0))
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    merge(module)
    params = dict(module.named_parameters())
    for name, mask in start[1].items():
        zeros = params[name].detach()[~mask]
        assert torch.equal(zeros.view(torch.int32), torch.zeros_like(zeros, dtype=torch.int32))
        assert not torch.equal(params[name], before[name])
    assert not [one for one in records(folder, "event") if "has masks" in one["message"]]


@pytest.mark.parametrize(
    ("adapter", "ranks", "plan"),
    [
        ("mask_lora", 2, {}),
        ("mask_lora", 2, {"mesh": {"pipe": 2}}),
        pytest.param("scale_lora", 2, {"mesh": {"pipe": 2}}, marks=pytest.mark.nightly),
        pytest.param("mask_lora", 2, {"sharding": "zero3"}, marks=pytest.mark.nightly),
        pytest.param("scale_lora", 1, {}, marks=pytest.mark.nightly),
    ],
)
def test_every_layout_keeps_the_zeros(
    pool: Pool, tmp_path: Path, start: Any, adapter: str, ranks: int, plan: dict[str, Any]
) -> None:
    sections = {"model": {"config": CONFIG, "start": str(start[0])}, "plan": plan}
    given = {"base": "llama", "adapter": adapter, "folder": str(tmp_path), "steps": STEPS, "sections": sections}
    pool.run("run.adapter_jobs:train", ranks, **given)
    check(tmp_path, start, adapter)


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        {"by_pattern": {"inner": "adamw"}},
        {"from_class": {"path": "torch.optim:AdamW"}},
        {"from_class": {"path": "torch.optim:ASGD"}},  # whose decay is called lambd
        {"proximal": {"inner": "sgd"}},
    ],
)
def test_scales_that_would_decay_are_refused(optimizer: Any) -> None:
    given = {"model": {"hf": "llama", "adapter": "scale_lora"}, "train": {"optimizer": optimizer}}
    plan = Plan(rows=(64,), microbatches=(1,))
    with pytest.raises(BadInput, match=r"train\.optimizer: wanted no weight decay and no penalty with model\.adapter"):
        recipe_check(RunConfig.model_validate(given), plan)
    given["model"]["adapter"] = "mask_lora"
    recipe_check(RunConfig.model_validate(given), plan)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"from_class": {"path": "torch.optim:NAdam"}},
        "sgd",
        {"static_mask": {"inner": "sgd"}},
        {"adamw": {"weight_decay": 0}},
    ],
)
def test_scales_without_decay_are_accepted(optimizer: Any) -> None:
    given = {"model": {"hf": "llama", "adapter": "scale_lora"}, "train": {"optimizer": optimizer}}
    recipe_check(RunConfig.model_validate(given), Plan(rows=(64,), microbatches=(1,)))


def test_it_is_resumed_on_another_number_of_ranks(pool: Pool, tmp_path: Path, start: Any) -> None:
    sections = {"model": {"config": CONFIG, "start": str(start[0])}}
    given = {"base": "llama", "adapter": "mask_lora", "folder": str(tmp_path), "sections": sections}
    pool.run("run.adapter_jobs:train", 1, steps=2, **given)
    pool.run("run.adapter_jobs:train", 2, steps=STEPS, resume=True, **given)
    check(tmp_path, start, "mask_lora")
