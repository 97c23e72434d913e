"""Adapters for 20 steps beside peft in one process: the losses, and by plain SGD what all gradients add up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from gossamer.model.adapter import REGISTRY, adapter_tensors, names
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.run.checkpoint import read_model
from gossamer.spec.config import ModelSection
from pool import Pool
from run.adapter_jobs import HEADS, SIZES, by_peft

pytest.importorskip("peft")
pytestmark = pytest.mark.nightly  # minutes in all; tests/run/test_adapters.py has the first steps
STEPS = 20
RATES = {"rslora": 0.01, "ia3": 0.3}  # others: 0.1. Where steps are too long, rounding grows from step to step
WAYS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one": (1, {}),
    "replicas": (2, {}),
    "zero1": (2, {"plan": {"sharding": "zero1"}}),
    "zero2": (2, {"plan": {"sharding": "zero2"}}),
    "zero3": (2, {"plan": {"sharding": "zero3"}}),
    "stages": (2, {"plan": {"mesh": {"pipe": 2}}}),
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


def trained(folder: Path, base: str, adapter: str, held: str = "full") -> dict[str, Tensor]:
    origin = origin_of(ModelSection(hf=base, adapter=adapter, base=held))
    found = origin.build(0)
    read_model(found, folder / "checkpoints", origin.base_digest(0))
    return tensors(found)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {one.name: one.tensor.detach() for one in adapter_tensors(module) if one.tensor.requires_grad}


def sgd(adapter: str) -> dict[str, Any]:
    return {"optimizer": {"sgd": {"lr": RATES.get(adapter, 0.1)}}}


def check(ours: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    """A tensor has moved by the rate times the sum of its gradients: equal to 1e-5 of the largest movement."""
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in theirs)
    apart = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    assert ours.keys() == theirs.keys() and moved > 1e-3
    assert apart <= 1e-5 * moved, (apart, moved)


PEFT = [one for one in names() if not (REGISTRY.type(one).replaces_layers or REGISTRY.type(one).keeps_masks)]


@pytest.mark.parametrize(("adapter", "way"), [*((one, "stages") for one in PEFT), *(("lora", way) for way in WAYS)])
def test_losses_and_gradients_are_those_of_peft(pool: Pool, tmp_path: Path, base: str, adapter: str, way: str) -> None:
    ranks, sections = WAYS[way]
    given = {"base": base, "adapter": adapter, "folder": str(tmp_path), "steps": STEPS}
    pool.run("run.adapter_jobs:train", ranks, sections={**sections, "train": sgd(adapter)}, **given)
    wanted, module = by_peft(base, adapter, STEPS, sgd=RATES.get(adapter, 0.1))
    assert losses(tmp_path) == pytest.approx(wanted, rel=1e-5)
    start = tensors(origin_of(ModelSection(hf=base, adapter=adapter)).build(0))
    check(trained(tmp_path, base, adapter), tensors(module), start)


def test_a_resumed_run_is_that_of_peft(pool: Pool, tmp_path: Path, base: str) -> None:
    given = {"base": base, "adapter": "lora", "folder": str(tmp_path)}
    stages = {**WAYS["stages"][1], "train": sgd("lora")}
    pool.run("run.adapter_jobs:train", 2, sections=stages, steps=9, **given)
    pool.run("run.adapter_jobs:train", 1, sections={"train": sgd("lora")}, steps=STEPS, resume=True, **given)
    wanted, module = by_peft(base, "lora", STEPS, sgd=0.1)
    assert losses(tmp_path) == pytest.approx(wanted, rel=1e-5)
    start = tensors(origin_of(ModelSection(hf=base, adapter="lora")).build(0))
    check(trained(tmp_path, base, "lora"), tensors(module), start)


@pytest.mark.parametrize(
    ("adapter", "held"), [("lora", "bf16"), ("lora", "int8"), ("rslora", "int4"), ("lora_fa", "int8")]
)
@pytest.mark.parametrize("way", ["stages", "replicas"])
def test_on_a_base_in_blocks_it_is_peft_on_the_decoded_weights(
    pool: Pool, tmp_path: Path, base: str, adapter: str, held: str, way: str
) -> None:
    ranks, sections = WAYS[way]
    given = {"base": base, "adapter": adapter, "held": held, "folder": str(tmp_path / "run"), "steps": STEPS}
    pool.run("run.adapter_jobs:train", ranks, sections={**sections, "train": sgd(adapter)}, **given)
    decoded = origin_of(ModelSection(hf=base, adapter="lora", base=held)).build(0)
    export_hf(decoded, None, None, tmp_path / "decoded")  # B is 0: the decoded weights
    wanted, module = by_peft(str(tmp_path / "decoded"), adapter, STEPS, sgd=RATES.get(adapter, 0.1))
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)
    start = tensors(origin_of(ModelSection(hf=base, adapter=adapter, base=held)).build(0))
    check(trained(tmp_path / "run", base, adapter, held), tensors(module), start)
