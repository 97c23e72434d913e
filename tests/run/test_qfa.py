"""A supernet of bit widths in whole runs: the same on any number of ranks and after a resume; subnets by budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gossamer.api import verbs
from gossamer.model.adapter import adapter_tensors
from gossamer.model.forward_adapter import caller_of
from gossamer.model.integer_widths import integers_of, weight_checksums
from gossamer.model.origin import origin_of
from gossamer.model.unit_seeds import unit_seeds
from gossamer.model.units import unit_names
from gossamer.quantize import build
from gossamer.quantize.model.layers import Calibration, quantize_layers
from gossamer.run.batches import DatasetBatches, Feed
from gossamer.run.checkpoint import read_model
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.store.integers_folder import IntegersContent, write_integers
from pool import Pool
from run.adapter_jobs import LR, Rows
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
def test_a_run_on_integers_of_a_folder_goes_on_with_them_and_with_no_others(
    pool: Pool, tmp_path: Path, base: str
) -> None:
    feed = Feed(DatasetBatches(Rows()), Plan(rows=(8,), microbatches=(1,)), 0, 0)
    steps = [feed.fetch(step)[0].rows for step in range(2)]
    write_integers(tmp_path / "integers", by_gptq(base, steps[0]))
    adapter = {"qfa": {**QFA["qfa"], "integers": str(tmp_path / "integers")}}
    given = {"base": base, "adapter": adapter, "sections": {}, "folder": str(tmp_path / "run")}
    pool.run("run.adapter_jobs:train", 1, steps=1, **given)
    pool.run("run.adapter_jobs:train", 1, steps=2, resume=True, **given)
    found = losses(tmp_path / "run")
    assert found == pytest.approx(in_one_loop(base, adapter, steps), rel=1e-5)
    assert found[0] != pytest.approx(in_one_loop(base, QFA, steps)[0], rel=1e-4)
    file = tmp_path / "integers" / "integers.json"
    file.write_text(file.read_text().replace('"method": "gptq"', '"method": "other"'))
    (refused,) = pool.attempt("run.adapter_jobs:train", 1, steps=3, resume=True, **given)
    assert refused["kind"] == "BadInput" and "qfa's integers) and adapter" in refused["error"]


def by_gptq(base: str, batch: dict[str, torch.Tensor]) -> IntegersContent:
    """The integers of all widths, calibrated on one batch."""
    module = origin_of(ModelSection(hf=base)).build(0)
    tensors, names = dict[str, torch.Tensor](), list[str]()
    for bits in (2, 3, 4):
        made = copy.deepcopy(module)
        calibration = Calibration(caller=caller_of(made, batch), batches=[batch])
        report = quantize_layers(made, build({"gptq": {"bits": bits, "group": 32}}), calibration)
        names = [one.name for one in report.layers]
        tensors |= integers_of(made, bits)
    weights = weight_checksums(module)
    return IntegersContent(
        tensors=tensors, method="gptq", group=32, widths=(2, 3, 4), layers=names, weights=weights, said={}
    )


def in_one_loop(base: str, adapter: dict[str, Any], steps: list[dict[str, torch.Tensor]]) -> list[float]:
    """The losses of steps by torch alone."""
    module = origin_of(ModelSection(hf=base, adapter=adapter)).build(0).train()
    seeds, found = unit_seeds(module, unit_names(module), seed=0), []
    trained = [p for p in module.parameters() if p.requires_grad]
    update = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, betas=(0.9, 0.95))
    for step, rows in enumerate(steps):
        with seeds.at(step, 0):
            loss = module(**rows, use_cache=False).loss
        update.zero_grad()
        loss.backward()
        update.step()
        found.append(float(loss.detach()))
    return found


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
