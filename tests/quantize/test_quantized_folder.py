"""`gossamer quantize` on a folder: what it writes loads again equal, in every command; GGUF files; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer import recipe
from gossamer.api import verbs
from gossamer.data.tokenizer.byte import Bytes
from gossamer.job.quantization import QuantizeRequest, quantize_model
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.model.packed_gguf import gguf_rows, gguf_type
from gossamer.model.quantized.packed import Packed
from gossamer.model.quantized_linear import quantized_layers
from gossamer.model.started_source import start_of
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from model.tiny import SIZES, VOCABULARY, Plain, batch

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a small llama, and text beside it."""
    here = tmp_path_factory.mktemp("quantize")
    config = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
    origin = origin_of(ModelSection(hf="llama", config=config)).fitted_to_tokenizer(VOCABULARY, 256)
    export_hf(origin.build(0), origin, Bytes(), here / "model")
    (here / "text.txt").write_text(TEXT)
    return here


def quantized(place: Path, by: Any, out: Path | None) -> dict[str, Any]:
    request = QuantizeRequest(
        source=place / "model", by=by, data=(str(place / "text.txt"),), sequence=32, calibration=16, out=out
    )
    return quantize_model(request)


def loaded(folder: Path) -> nn.Module:
    return origin_of(ModelSection(hf=str(folder))).build(0).eval()


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(**batch()).logits
    return found


@pytest.mark.parametrize("by", [{"gptq": {"bits": 3}}])
def test_what_is_written_is_what_was_measured(place: Path, tmp_path: Path, by: Any) -> None:
    data = quantized(place, by, tmp_path / "out")
    (name,) = by
    assert data["bits"] == by[name]["bits"] and data["bytes_after"] < 0.7 * data["bytes_before"]
    assert abs(data["loss_after"] - data["loss_before"]) < 0.2
    assert data["file_bytes"] == data["bytes_after"]
    again = verbs.evaluate(tmp_path / "out", [place / "text.txt"], sequence=32)
    before = verbs.evaluate(place / "model", [place / "text.txt"], sequence=32)
    assert 0 < abs(again["loss"] - before["loss"]) < 0.2
    said = json.loads((tmp_path / "out" / "quantized.json").read_text())["said"]
    assert said["loss_after"] == data["loss_after"]
    first, second = loaded(tmp_path / "out"), loaded(tmp_path / "out")
    assert len(quantized_layers(first)) == 14 and torch.equal(logits(first), logits(second))
    assert verbs.sample(tmp_path / "out", "the ", tokens=3, temperature=0) == verbs.sample(
        tmp_path / "out", "the ", tokens=3, temperature=0
    )


def test_transformers_loads_the_export_with_equal_logits(place: Path, tmp_path: Path) -> None:
    import transformers

    quantized(place, {"gptq": {"bits": 4}}, tmp_path / "out")
    with pytest.raises(OSError, match=r"model\.safetensors"):  # it is no model of theirs
        transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    verbs.export(tmp_path / "out", tmp_path / "hf", to="hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf")).eval()
    assert torch.equal(logits(theirs), logits(loaded(tmp_path / "out")))


FITTING: dict[str, dict[str, Any]] = {
    "Q8_0": {"bits": 8, "group": 32, "symmetric": True},
    "Q4_0": {"bits": 4, "group": 32, "symmetric": True},
    "Q4_1": {"bits": 4, "group": 32},
    "Q5_0": {"bits": 5, "group": 32, "symmetric": True},
    "Q5_1": {"bits": 5, "group": 32},
}


@pytest.mark.parametrize("kind", FITTING)
def test_packed_integers_are_the_same_numbers_in_a_gguf_type(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    format = Packed(**FITTING[kind])
    blocks = format.encode(torch.randn(6, 96, generator=torch.Generator().manual_seed(0)))
    rows = gguf_rows(format, blocks, 96)
    assert gguf_type(format) == kind
    theirs = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(theirs, format.decode(blocks, 96).numpy())


def test_a_gguf_file_holds_the_same_numbers_as_the_folder(place: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    by = {"gptq": FITTING["Q4_0"]}
    quantized(place, by, tmp_path / "out")
    quantized(place, by, tmp_path / "direct.gguf")
    verbs.export(tmp_path / "out", tmp_path / "later.gguf", to="gguf")
    found = {one.name: one for one in gguf.GGUFReader(str(tmp_path / "later.gguf")).tensors}
    direct = {one.name: one for one in gguf.GGUFReader(str(tmp_path / "direct.gguf")).tensors}
    module = loaded(tmp_path / "out")
    up = found["blk.1.ffn_up.weight"]
    assert up.tensor_type.name == "Q4_0" == direct["blk.0.attn_q.weight"].tensor_type.name
    layer = module.get_submodule("model.layers.1.mlp.up_proj")
    assert np.array_equal(gguf.dequantize(up.data, up.tensor_type), layer.weight.numpy())  # type: ignore[operator, union-attr]
    assert all(np.array_equal(found[name].data, direct[name].data) for name in found)
    theirs = origin_of(ModelSection(gguf=str(tmp_path / "later.gguf"))).build(0).eval()
    assert (logits(theirs) - logits(module)).abs().max() < 1e-3  # the embedding is in float16 there
    for name, one in quantized_layers(module).items():  # query and key have their rows in another order there
        assert torch.equal(theirs.get_submodule(name).weight, one.weight), name


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("llama", {**SIZES, "hidden_size": 64, "intermediate_size": 72}, "72 in model.layers.0.mlp.down_proj"),
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}, "GPT2LMHeadModel"),
    ],
)
def test_a_model_without_a_gguf_file_is_refused_before_anything_is_computed(
    place: Path, tmp_path: Path, kind: str, config: dict[str, Any], said: str
) -> None:
    origin = origin_of(ModelSection(hf=kind, config=config)).fitted_to_tokenizer(VOCABULARY, 256)
    export_hf(origin.build(0), origin, Bytes(), tmp_path / "model")
    by = {"round_to_nearest": {"bits": 4, "group": 32}}
    request = QuantizeRequest(
        source=tmp_path / "model", by=by, data=(str(place / "text.txt"),), sequence=32, out=tmp_path / "out.gguf"
    )
    told: list[str] = []
    with pytest.raises(BadInput, match=said):
        quantize_model(request, lambda what, done, total: told.append(what))
    assert not told and not (tmp_path / "out.gguf").exists()


def test_integers_without_a_gguf_type_are_refused_before_anything_is_computed(place: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--bits 4 --group 32"):
        quantized(place, {"gptq": {"bits": 3}}, tmp_path / "out.gguf")
    quantized(place, {"round_to_nearest": {"bits": 4}}, tmp_path / "out")
    with pytest.raises(BadInput, match="groups of 64"):
        verbs.export(tmp_path / "out", tmp_path / "out.gguf", to="gguf")
    assert not (tmp_path / "out.gguf").exists()
    verbs.export(tmp_path / "out", tmp_path / "wide.gguf", to="gguf", type="f16")


def test_sources_and_targets_that_are_refused(place: Path, tmp_path: Path) -> None:
    quantized(place, {"round_to_nearest": {}}, tmp_path / "out")
    for made in (tmp_path / "out", tmp_path / "adapter", tmp_path / "theirs", tmp_path / "nothing"):
        if made.name == "adapter":
            made.mkdir()
            (made / "adapter_config.json").write_text("{}")
        if made.name == "theirs":
            made.mkdir()
            (made / "config.json").write_text('{"model_type": "llama", "quantization_config": {}}')
    said = {
        "out": "integers of integers",
        "adapter": "an adapter",
        "theirs": "quantization_config",
        "nothing": "no such",
    }
    for name, words in said.items():
        with pytest.raises(BadInput, match=words):
            quantize_model(QuantizeRequest(source=tmp_path / name, by={"round_to_nearest": {}}))
    with pytest.raises(BadInput, match="which exists"):
        quantized(place, {"round_to_nearest": {}}, tmp_path / "out")
    with pytest.raises(BadInput, match="calibration text"):
        quantize_model(QuantizeRequest(source=place / "model", by="gptq"))
    (tmp_path / "short.txt").write_text("too short")
    for file, sequence, words in (
        (place / "text.txt", 4096, "at most 2048 tokens, as many as the model sees"),
        (tmp_path / "short.txt", 2048, "at least 2 sequences"),
    ):
        with pytest.raises(BadInput, match=words):
            quantize_model(QuantizeRequest(source=place / "model", by="gptq", data=(str(file),), sequence=sequence))


def test_a_folder_that_was_changed_is_not_loaded(place: Path, tmp_path: Path) -> None:
    quantized(place, {"round_to_nearest": {}}, tmp_path / "out")
    weights = tmp_path / "out" / "quantized.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-100] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(BadInput, match="with other data"):
        loaded(tmp_path / "out")
    weights.write_bytes(raw[:-200])
    with pytest.raises(BadInput, match="cannot be read"):
        loaded(tmp_path / "out")
    for more in ({"base": "int8", "adapter": "lora"}, {"config": {"hidden_size": 8}}):
        with pytest.raises(BadInput, match=r"leave it out"):
            origin_of(ModelSection(hf=str(tmp_path / "out"), **more))
    with pytest.raises(BadInput, match=r"model\.base"):
        origin_of(ModelSection(hf=str(tmp_path / "out"), base="int8", adapter="lora"))


def test_a_model_of_a_factory_comes_back(tmp_path: Path) -> None:
    from gossamer.model.quantized_folder import quantized_content
    from gossamer.quantize import build
    from gossamer.quantize.model.layers import quantize_layers
    from gossamer.store.quantized_folder import write_quantized

    section = ModelSection(factory="model.tiny:Plain", config={"width": 32, "layers": 2})
    origin = origin_of(section)
    module = origin.build(3)
    quantize_layers(module, build("round_to_nearest"))
    content = quantized_content(module, origin, Bytes(), method="round_to_nearest", said={}, dtype=torch.float32)
    write_quantized(tmp_path / "out", content)
    again = loaded(tmp_path / "out")
    assert isinstance(again, Plain) and again.head.weight is again.embed.weight
    ids = batch()["input_ids"]
    assert torch.equal(module.eval()(ids), again(ids))


def test_a_quantized_folder_is_not_trained_without_an_adapter(place: Path, tmp_path: Path) -> None:
    """Its integers would stay, and embeddings, norms and the head be trained alone, in silence."""
    quantized(place, {"gptq": {"bits": 4}}, tmp_path / "out")
    plan = Plan.model_validate({"mesh": {"replica": 1}, "batch_fractions": (1.0,), "rows": (64,), "microbatches": (1,)})
    named = {"hf": str(tmp_path / "out")}
    for model in (named, {"hf": str(place / "model"), "start": str(tmp_path / "out")}):
        with pytest.raises(BadInput, match=r"model\.adapter: wanted an adapter or a side network .* none on"):
            recipe.check(RunConfig.model_validate({"model": model}), plan)
    for more in ({"adapter": "lora"}, {"unfreeze": ["norm"]}, {"side": "unipt"}):
        recipe.check(RunConfig.model_validate({"model": {**named, **more}}), plan)


def test_an_adapter_trains_on_a_quantized_folder(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    quantized(place, {"gptq": {"bits": 4}}, tmp_path / "out")
    module = origin_of(ModelSection(hf=str(tmp_path / "out"), adapter={"lora": {"rank": 4}})).build(0)
    assert torch.equal(logits(module.eval()), logits(loaded(tmp_path / "out")))
    started = ModelSection(hf=str(place / "model"), start=str(tmp_path / "out"))
    assert torch.equal(logits(module), logits(origin_of(started).build(0).eval())) and start_of(started) is None
    module.train()(**batch()).loss.backward()
    trained = {name for name, p in module.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)
