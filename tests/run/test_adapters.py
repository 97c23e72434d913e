"""Adapters as whole runs: replicas, sharded states, stages and islands train what peft trains in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gossamer.model.adapter import REGISTRY, adapter_tensors, merge, names
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.run.checkpoint import read_model
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import CheckpointMismatch
from pool import Pool
from run.adapter_jobs import HEADS, SIZES, by_peft, islands_by_peft

pytest.importorskip("peft")
STEPS = 5
WAYS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one": (1, {}),
    "replicas": (2, {}),
    "zero1": (2, {"plan": {"sharding": "zero1"}}),
    "zero2": (2, {"plan": {"sharding": "zero2"}}),
    "zero3": (2, {"plan": {"sharding": "zero3"}}),
    "stages": (2, {"plan": {"mesh": {"pipe": 2}}, "train": {"prove": "always"}}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small Llama."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    module = origin_of(ModelSection(hf="llama", config={**SIZES, **HEADS})).build(1)
    module.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return [one["loss"] for one in lines if one["kind"] == "step"]


def proofs(folder: Path) -> list[dict[str, Any]]:
    return [
        one for one in map(json.loads, (folder / "records.jsonl").read_text().splitlines()) if one["kind"] == "proof"
    ]


AT_NIGHT = (("lora", "bf16"), ("rslora", "int4"), ("lora_fa", "int8"))
DAILY = ("lora",)  # the others at night, and all of them for 20 steps (test_adapters_long.py)


PEFT = [one for one in names() if not (REGISTRY.type(one).replaces_layers or REGISTRY.type(one).keeps_masks)]


@pytest.mark.parametrize(
    "adapter", [pytest.param(one, marks=[] if one in DAILY else [pytest.mark.nightly]) for one in PEFT]
)
def test_every_kind_is_that_of_peft(pool: Pool, tmp_path: Path, base: str, adapter: str) -> None:
    ranks, sections = WAYS["stages"]
    given = {"base": base, "adapter": adapter, "folder": str(tmp_path), "steps": STEPS}
    pool.run("run.adapter_jobs:train", ranks, sections=sections, **given)
    wanted, module = by_peft(base, adapter, STEPS)
    assert losses(tmp_path) == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted[-1] - wanted[0]) > 1e-3
    origin = origin_of(ModelSection(hf=base, adapter=adapter))
    found = origin.build(0)
    read_model(found, tmp_path / "checkpoints", origin.base_digest(0))
    for one, other in zip(adapter_tensors(found), adapter_tensors(module), strict=True):
        assert torch.allclose(one.tensor, other.tensor, atol=2e-4), one.name  # AdamW moves by lr, 5e-3, in each step


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.nightly] if way in ("zero1", "zero2") else [])
        for way in WAYS
        if way != "stages"
    ],
)
def test_every_layout_trains_the_same_adapter(pool: Pool, tmp_path: Path, base: str, way: str) -> None:
    ranks, sections = WAYS[way]
    given = {"base": base, "adapter": "lora", "folder": str(tmp_path), "steps": STEPS}
    pool.run("run.adapter_jobs:train", ranks, sections=sections, **given)
    assert losses(tmp_path) == pytest.approx(by_peft(base, "lora", STEPS)[0], rel=1e-5)


@pytest.mark.nightly
def test_the_proof_sees_both_factors(pool: Pool, tmp_path: Path, base: str) -> None:
    """B starts at 0, and with it the gradient of A: the proof moves the weights before it compares."""
    ranks, sections = WAYS["stages"]
    given = {"base": base, "adapter": "lora", "folder": str(tmp_path), "steps": 1}
    pool.run("run.adapter_jobs:train", ranks, sections=sections, **given)
    (proof,) = proofs(tmp_path)
    assert (proof["outcome"], proof["proved"], proof["tensors"]) == ("equal", 56, 56)


def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_with_other_ranks(
    pool: Pool, tmp_path: Path, base: str
) -> None:
    given = {"base": base, "adapter": "lora", "folder": str(tmp_path)}
    pool.run("run.adapter_jobs:train", 2, sections=WAYS["stages"][1], steps=3, **given)
    stored = [name for file in tmp_path.glob("checkpoints/*/*.safetensors") for name in load_file(file)]
    weights = {name for name in stored if name.startswith("model/")}
    assert weights and all("lora_" in name and "default" not in name for name in weights)
    assert "model/model.layers.0.self_attn.q_proj.lora_A.weight" in weights
    pool.run("run.adapter_jobs:train", 1, steps=STEPS, resume=True, **given)
    assert losses(tmp_path) == pytest.approx(by_peft(base, "lora", STEPS)[0], rel=1e-5)


def test_an_adapter_of_another_base_is_refused(pool: Pool, tmp_path: Path, base: str) -> None:
    given = {"base": base, "adapter": "lora", "folder": str(tmp_path / "run"), "steps": 1}
    pool.run("run.adapter_jobs:train", 1, **given)
    other = str(tmp_path / "other")
    origin_of(ModelSection(hf=base)).build(0).half().save_pretrained(other)  # type: ignore[operator]
    origin = origin_of(ModelSection(hf=other, adapter="lora"))
    with pytest.raises(CheckpointMismatch, match="of an adapter or side network alone, on the base with digest"):
        read_model(origin.build(0), tmp_path / "run" / "checkpoints", origin.base_digest(0))


def test_a_coded_exchange_sends_the_adapter_alone(pool: Pool, tmp_path: Path, base: str) -> None:
    sections = {"plan": {"exchange": {"error_feedback": {"two_shot": {"codec": "int8"}}}}}
    given = {"base": base, "adapter": "lora_fa", "folder": str(tmp_path), "steps": STEPS}
    pool.run("run.adapter_jobs:train", 2, sections=sections, **given)
    lines = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    sent = [one["wire_bytes"] for one in lines if one["kind"] == "step"]
    trained = sum(
        one.tensor.numel()
        for one in adapter_tensors(origin_of(ModelSection(hf=base, adapter="lora_fa")).build(0))
        if one.slot == "lora_B"
    )
    assert all(trained < sum(one.values() if isinstance(one, dict) else [one]) < 1.3 * trained for one in sent)
    assert losses(tmp_path) == pytest.approx(by_peft(base, "lora_fa", STEPS)[0], rel=2e-2)


def test_islands_meet_as_in_one_process(pool: Pool, tmp_path: Path, base: str) -> None:
    outer = {"outer_optimizer": {"nesterov": {"lr": 0.7, "momentum": 0.9}}}
    sections = {"plan": {"sync": {"diloco": {"sync_every": 3, **outer}}}, "machines": {"islands": [[0], [1]]}}
    given = {"base": base, "adapter": "lora", "folder": str(tmp_path), "steps": 6}
    pool.run("run.adapter_jobs:train", 2, sections=sections, **given)
    origin = origin_of(ModelSection(hf=base, adapter="lora"))
    found = origin.build(0)
    read_model(found, tmp_path / "checkpoints", origin.base_digest(0))
    ours = [p.detach() for p in found.parameters() if p.requires_grad]
    wanted = islands_by_peft(base, "lora", 6, period=3, lr=0.7, momentum=0.9)
    start = [p.detach() for p in origin.build(0).parameters() if p.requires_grad]
    for one, other, before in zip(ours, wanted, start, strict=True):
        assert float((other - before).abs().max()) > 1e-3
        assert torch.allclose(one, other, atol=2e-4)


@pytest.mark.parametrize(
    ("adapter", "held"),
    [pytest.param(*one, marks=pytest.mark.nightly) for one in (("lora", "int8"), *AT_NIGHT)],
)
def test_on_a_base_in_blocks_it_is_peft_on_the_decoded_weights(
    pool: Pool, tmp_path: Path, base: str, adapter: str, held: str
) -> None:
    way = WAYS["stages" if adapter == "lora" else "replicas"]
    given = {"base": base, "adapter": adapter, "held": held, "folder": str(tmp_path / "run"), "steps": STEPS}
    pool.run("run.adapter_jobs:train", way[0], sections=way[1], **given)
    origin = origin_of(ModelSection(hf=base, adapter=adapter, base=held))
    module = origin.build(0)
    read_model(module, tmp_path / "run" / "checkpoints", origin.base_digest(0))
    decoded = origin_of(ModelSection(hf=base, adapter="lora", base=held)).build(0)
    export_hf(decoded, None, None, tmp_path / "decoded")  # B is 0: the decoded weights
    assert losses(tmp_path / "run") == pytest.approx(by_peft(str(tmp_path / "decoded"), adapter, STEPS)[0], rel=1e-5)
    assert not [
        file for file in (tmp_path / "run").glob("checkpoints/*/*.safetensors") if b"blocks" in file.read_bytes()
    ]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = module.eval()(input_ids=ids).logits
        merge(module)
        assert torch.allclose(module(input_ids=ids).logits, wanted, atol=1e-5)
