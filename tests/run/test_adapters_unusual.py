"""Adapters in unusual places, as whole runs beside peft in one process: tied heads, Conv1D, experts, frozen factors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.model.origin import origin_of
from gossamer.spec.config import ModelSection
from pool import Pool
from run.adapter_jobs import HEADS, SIZES, by_peft

pytest.importorskip("peft")
pytestmark = pytest.mark.nightly  # a whole run each
STEPS = 6
LLAMA = {**SIZES, **HEADS}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 32}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
STAGES: dict[str, Any] = {"plan": {"mesh": {"pipe": 2}}}
ZERO2, ZERO3 = ({"plan": {"sharding": f"zero{n}"}} for n in (2, 3))
TIED = {**LLAMA, "tie_word_embeddings": True}
HEAD = {"targets": ["lm_head", "q_proj"]}

# name: model type, config, adapter, more of the model, layout
CASES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any], dict[str, Any]]] = {
    "tied head in stages": ("llama", TIED, {"lora": HEAD}, {}, STAGES),
    "tied head, dora, zero3": ("llama", TIED, {"dora": HEAD}, {}, ZERO3),
    "trained tied embedding and norms in stages": ("llama", TIED, "lora", {"unfreeze": ["norm", "embed"]}, STAGES),
    "trained tied embedding in zero3": ("llama", TIED, "lora", {"unfreeze": ["embed"]}, ZERO3),
    "an adapted layer trained itself": ("llama", LLAMA, "lora", {"unfreeze": ["k_proj.weight"]}, STAGES),
    "a frozen factor": ("llama", LLAMA, "lora", {"freeze": ["lora_A"]}, ZERO2),
    "half of the adapters frozen in stages": ("llama", LLAMA, "lora", {"freeze": ["layers.[01]"]}, STAGES),
    "vera on layers of many shapes": ("llama", LLAMA, {"vera": {"rank": 5}}, {}, ZERO3),
    "dora on Conv1D in stages": ("gpt2", {**GPT2, **NO_DROPOUT}, "dora", {}, STAGES),
    "ia3 on Conv1D, zero3": ("gpt2", {**GPT2, **NO_DROPOUT}, "ia3", {}, ZERO3),
    "micro-batches in zero3": ("llama", LLAMA, "lora", {}, {**ZERO3, "train": {"accumulate": 2}}),
}


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return [one["loss"] for one in lines if one["kind"] == "step"]


def saved(folder: Path, kind: str, config: dict[str, Any]) -> str:
    origin_of(ModelSection(hf=kind, config=config)).build(1).save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


@pytest.mark.parametrize("case", CASES)
def test_it_is_peft_in_one_process(pool: Pool, tmp_path: Path, case: str) -> None:
    kind, config, adapter, model, sections = CASES[case]
    base = saved(tmp_path / "base", kind, config)
    given = {"base": base, "adapter": adapter, "folder": str(tmp_path / "run"), "steps": STEPS}
    pool.run("run.adapter_jobs:train", 2, sections={**sections, "model": model}, **given)
    wanted, _ = by_peft(base, adapter, STEPS, model=model)
    assert abs(wanted[-1] - wanted[0]) > 1e-3
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)


def test_beside_experts_in_stages_it_is_peft_too(pool: Pool, tmp_path: Path) -> None:
    """By plain SGD: AdamW's first steps have the size of its rate however small a gradient, and so rounding's too."""
    base, adapter = saved(tmp_path / "base", "mixtral", MIXTRAL), {"rslora": {"rank": 3}}
    sections = {**STAGES, "train": {"optimizer": {"sgd": {"lr": 0.01}}}}
    given = {"base": base, "adapter": adapter, "folder": str(tmp_path / "run"), "steps": 4}
    pool.run("run.adapter_jobs:train", 2, sections=sections, **given)
    assert losses(tmp_path / "run") == pytest.approx(by_peft(base, adapter, 4, sgd=0.01)[0], rel=1e-5)


@pytest.mark.parametrize("way", ["stages", "zero3", "recompute"])
def test_dropout_is_that_of_one_process(pool: Pool, tmp_path: Path, way: str) -> None:
    base = saved(tmp_path / "base", "llama", LLAMA)
    adapter = {"lora": {"dropout": 0.2}}
    given = {"base": base, "adapter": adapter, "steps": STEPS}
    train = {"train": {"accumulate": 2}}
    pool.run("run.adapter_jobs:train", 1, sections=train, folder=str(tmp_path / "one"), **given)
    recompute = {"plan": {"mesh": {"pipe": 2}, "pipeline_schedule": {"recompute": {"inner": "one_f_one_b"}}}}
    more = {"stages": {**STAGES, **train}, "zero3": ZERO3, "recompute": {**recompute, **train}}[way]
    pool.run("run.adapter_jobs:train", 2, sections=more, folder=str(tmp_path / "two"), **given)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "one") != pytest.approx(by_peft(base, "lora", STEPS)[0], rel=1e-5)
