"""`gossamer prune` on folders and runs: what is written, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.api.verbs import prune
from gossamer.cli import main
from gossamer.job.continued_model import write_continued
from gossamer.model.origin import origin_of
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.start_folder import MASKS, StartFolder
from prune.experts import of_transformers

LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TEXT = "".join(f"{number} and {number * number}, then {number % 7}.\n" for number in range(400))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with folders of random models and their tokenizer, and a text."""
    from transformers import PreTrainedTokenizerFast

    from gossamer.data.tokenizer import parse_tokenizer

    root = tmp_path_factory.mktemp("models")
    tokenizer = parse_tokenizer("byte").make(lambda: (), identity="", cache=root)
    llama = ModelSection(hf="llama", config={**LLAMA, "vocab_size": tokenizer.vocabulary})
    models: dict[str, Any] = {"llama": origin_of(llama).build(1)}
    models |= {kind: of_transformers(kind, vocab_size=tokenizer.vocabulary) for kind in ("mixtral", "olmoe")}
    for kind, module in models.items():
        module.save_pretrained(root / kind)
        tokenizer.save(root / kind)
        assert PreTrainedTokenizerFast.from_pretrained(root / kind) is not None
    (root / "text.txt").write_text(TEXT)
    return root


def options(place: Path, **more: Any) -> dict[str, Any]:
    return {"data": [place / "text.txt"], "sequence": 32, "sequences": 8, "calibration": 12, **more}


@pytest.mark.parametrize(
    ("kind", "by"), [("llama", "wanda"), ("mixtral", "moe_pruner"), ("olmoe", "moe_pruner"), ("llama", "magnitude")]
)
def test_transformers_loads_what_is_written(place: Path, tmp_path: Path, kind: str, by: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = prune(place / kind, by=by, pattern="2:4", out=tmp_path / "out", **options(place))
    assert data["sparsity"] == pytest.approx(0.5) and data["calibration_sequences"] == (12 if by != "magnitude" else 0)
    folder = StartFolder(tmp_path / "out")
    masks = dict(folder.masks())
    module: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    params, before = (dict(m.named_parameters()) for m in (module, AutoModelForCausalLM.from_pretrained(place / kind)))
    for name, one in params.items():
        mask = masks.get(name, torch.ones_like(one, dtype=torch.bool))
        assert torch.equal(one, torch.where(mask, before[name], 0.0)), name
    assert len(masks) == (14 if kind == "llama" else 12) and folder.method == {by: {"pattern": "2:4"}}
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids == [ord("a")]
    assert folder.said["loss_after"] == data["loss_after"] != data["loss_before"]
    state = sum(one.nbytes for one in params.values())
    zeros = sum(int((~mask).sum()) for mask in masks.values())
    bits = sum(mask.numel() for mask in masks.values())
    assert (data["bytes"], data["bytes_sparse"]) == (state, state - 4 * zeros + bits // 8)


def test_the_losses_are_those_of_gossamer_eval_on_the_last_fifth(place: Path, tmp_path: Path) -> None:
    given = options(place, sequences=10_000)
    data = prune(place / "llama", sparsity=0.6, out=tmp_path / "out", **given)
    tokens, count = 32, data["texts"][0]["sequences"]
    (tmp_path / "rest.txt").write_text(TEXT)
    whole = gossamer.evaluate(tmp_path / "out", [tmp_path / "rest.txt"], sequence=tokens)
    assert count == whole["sequences"] // 5 > 1
    first = gossamer.evaluate(
        tmp_path / "out", [tmp_path / "rest.txt"], sequence=tokens, sequences=whole["sequences"] - count
    )
    nats = whole["loss"] * whole["labels"] - first["loss"] * first["labels"]
    assert data["loss_after"] == pytest.approx(nats / (whole["labels"] - first["labels"]), rel=1e-4)


def test_the_seed_chooses_the_calibration_text(place: Path) -> None:
    found = [prune(place / "llama", seed=seed, **options(place, calibration=2))["loss_after"] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_a_run_is_pruned_on_its_own_text(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = gossamer.train(
        {"hf": "llama", "config": LLAMA},
        f"text:{place / 'text.txt'}",
        {"data": {"sequence": 32, "validation": 0.5}, "train": {"steps": 2, "batch": 4}, "run": {"directory": "runs"}},
    )
    run = found.run.path
    data = prune(run, sparsity=0.5, calibration=4, sequences=4, out=tmp_path / "out")
    assert data["step"] == 2 and data["calibration_sequences"] == 4
    again = prune(tmp_path / "out", by="magnitude", sparsity=0.5)
    assert again["sparsity"] == pytest.approx(0.5) and again["loss_after"] is None
    started = origin_of(ModelSection(hf="llama", config={**LLAMA, "vocab_size": 257}, start=str(tmp_path / "out")))
    masks = dict(StartFolder(tmp_path / "out").masks())
    params = dict(started.build(0).named_parameters())
    assert all(not bool(params[name][~mask].count_nonzero()) for name, mask in masks.items())


@pytest.mark.parametrize("adapter", ["mask_lora", "lora"])
def test_masks_go_on_to_the_next_phase_where_their_zeros_are_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    prune(place / "llama", by="magnitude", out=tmp_path / "pruned", **options(place))
    train = {"steps": 2, "batch": 4, "optimizer": {"adamw": {"lr": 0.1}}}
    run = gossamer.train(
        {"hf": str(tmp_path / "pruned"), "adapter": {adapter: {"targets": ["q_proj"]}}},
        f"text:{place / 'text.txt'}",
        {"data": {"sequence": 32, "validation": 0.5}, "train": train, "run": {"directory": "runs"}},
    ).run.path
    write_continued(run, tmp_path / "next")
    before, after = (StartFolder(tmp_path / name) for name in ("pruned", "next"))
    filled = {name for name in before.kinds(MASKS) if "q_proj" in name} if adapter == "lora" else set()
    masks = dict(after.masks())
    assert masks.keys() == before.kinds(MASKS).keys() - filled
    for name, mask in masks.items():
        assert torch.equal(mask, before.tensor(name, MASKS).bool()) and not bool(after.tensor(name)[~mask].any())


def test_padding_does_not_count(place: Path, tmp_path: Path) -> None:
    lines = [f"{number}, {'x' * (number % 9)}." for number in range(60)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    given = options(place, data=[tmp_path / "short.jsonl"], calibration=100)
    data = prune(place / "llama", **given)
    assert data["calibration_sequences"] == 48
    assert {one["tokens"] for one in data["layers"]} == {sum(len(line) + 1 for line in lines[:48])}


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (None, {"data": []}, "name text files with --data, or prune with --by magnitude"),
        (None, {"sparsity": 1.0}, "above 0 and below 1"),
        (None, {"sparsity": 0.5, "pattern": "2:4"}, "leave one out"),
        (None, {"pattern": "3:5"}, "16 weights a row in model"),
        (None, {"by": "wander"}, "did you mean 'wanda'"),
        (None, {"by": "moe_pruner"}, "choose wanda"),
        (None, {"sequence": 100}, "at most 64"),
        (None, {"out": "."}, "which exists"),
        (None, {"checkpoint": "best"}, "leave --checkpoint out"),
        ("adapter_config.json", {}, "an adapter on frozen weights"),
        ("quantized.json", {}, "a quantized one"),
        ("quantization_config", {}, "has a quantization_config"),
        ("config.json", {}, "something else"),
    ],
)
def test_bad_input_is_named(place: Path, tmp_path: Path, change: str | None, given: Any, said: str) -> None:
    source = place / "llama"
    if change is not None:
        source = tmp_path / "source"
        source.mkdir()
        for file in (place / "llama").iterdir():
            if file.name != change:
                (source / file.name).symlink_to(file)
        if change == "quantization_config":
            (source / "config.json").unlink()
            (source / "config.json").write_text(json.dumps({"model_type": "llama", change: {}}))
        elif change != "config.json":
            (source / change).write_text("{}")
    with pytest.raises(BadInput, match=said):
        prune(source, **{**options(place), **given})


def test_the_command_says_what_it_did(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["prune", str(place / "mixtral"), "--by", "moe_pruner", "--data", str(place / "text.txt")]
    args += ["--sequence", "32", "--sequences", "4", "--calibration", "4", "--exclude", "q_proj", "--exclude", "k_proj"]
    assert main([*args, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "20 matrices, 50.0% of each are zero" in said and "difference" in said
    assert "left as they are, excluded: model.layers.0.self_attn" in said
    assert f"model.start: {tmp_path / 'out'}" in said
    assert main([*args, "--json"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(data["layers"]) == 20 and data["out"] is None and data["loss_after"] > 0
    assert main(["prune", str(place / "llama"), "--sparsity", "0"]) == 2
