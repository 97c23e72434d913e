"""A supernet of bit widths in whole runs: the same on any number of ranks and after a resume; subnets by budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gossamer.api import verbs
from gossamer.model.adapter import adapter_tensors
from gossamer.model.origin import origin_of
from gossamer.run.checkpoint import read_model
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from pool import Pool
from run.test_adapters import WAYS, base, losses

__all__ = ["base"]
QFA: dict[str, Any] = {"qfa": {"rank": 2, "group": 32, "cycle": 4}}
STEPS = 5


def tensors(folder: Path, base: str) -> dict[str, torch.Tensor]:
    """What a run has trained."""
    origin = origin_of(ModelSection(hf=base, adapter=QFA))
    module = origin.build(0)
    read_model(module, folder / "checkpoints", origin.base_digest(0))
    return {one.name: one.tensor for one in adapter_tensors(module)}


@pytest.mark.parametrize(
    "way", ["replicas", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("zero1", "zero2", "resumed"))]
)
def test_ranks_sample_the_same_widths_and_train_the_same_adapters(
    pool: Pool, tmp_path: Path, base: str, way: str
) -> None:
    given = {"base": base, "adapter": QFA}
    pool.run("run.adapter_jobs:train", 1, sections={}, steps=STEPS, folder=str(tmp_path / "one"), **given)
    there = {**given, "folder": str(tmp_path / "other")}
    ranks, sections = WAYS.get(way, (2, {}))
    if way == "resumed":
        pool.run("run.adapter_jobs:train", 1, sections={}, steps=3, **there)
        pool.run("run.adapter_jobs:train", ranks, sections={}, steps=STEPS, resume=True, **there)
    else:
        pool.run("run.adapter_jobs:train", ranks, sections=sections, steps=STEPS, **there)
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, other = tensors(tmp_path / "one", base), tensors(tmp_path / "other", base)
    assert all(torch.allclose(one[name], other[name], atol=2e-4) for name in one)
    stored = [name for file in (tmp_path / "one").glob("checkpoints/*/*.safetensors") for name in load_file(file)]
    assert not any("held_" in name for name in stored)  # the integers follow from the base


@pytest.mark.nightly
def test_a_trained_run_is_quantized_and_a_supernet_gives_subnets_by_budget(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a small text of some words, again and again: " * 400)
    data = {"source": f"text:{tmp_path}/text.txt", "sequence": 32, "validation": {"held": f"text:{tmp_path}/text.txt"}}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shared = {"data": data, "train": {"steps": 6, "batch": 8}, "run": {"directory": str(tmp_path / "runs")}}
    run = verbs.train({"hf": "llama", "config": sizes}, None, shared).run.path
    found = verbs.quantize(run, by="gptq", bits=4, out=tmp_path / "four", sequences=8, calibration=8)
    assert found["texts"][0]["text"] == "held" and abs(found["loss_after"] - found["loss_before"]) < 0.1
    assert verbs.evaluate(tmp_path / "four", [tmp_path / "text.txt"], sequence=32, sequences=4)["loss"] < 6
    with pytest.raises(BadInput, match="leave it out, and say --bits"):
        verbs.quantize(run, budget=3.0)
    verbs.export(run, tmp_path / "base")
    model = {"hf": str(tmp_path / "base"), "adapter": QFA}
    data = {**data, "tokenizer": f"hf:{tmp_path}/base"}
    supernet = verbs.train(model, None, {**shared, "data": data}).run.path
    with pytest.raises(BadInput, match="--budget 3"):
        verbs.quantize(supernet)
    subnet = verbs.quantize(supernet, budget=2.5, out=tmp_path / "sub", sequences=8, calibration=4)
    assert subnet["bits_per_weight"] <= 2.5 and subnet["bytes_after"] < subnet["bytes_before"]
    again = verbs.evaluate(tmp_path / "sub", [tmp_path / "text.txt"], sequence=32, sequences=4)
    verbs.export(tmp_path / "sub", tmp_path / "sub_hf")
    merged = verbs.evaluate(tmp_path / "sub_hf", [tmp_path / "text.txt"], sequence=32, sequences=4)
    assert merged["loss"] == pytest.approx(again["loss"], abs=1e-4)
    with pytest.raises(BadInput, match="peft"):
        verbs.export(supernet, tmp_path / "peft", to="peft")
