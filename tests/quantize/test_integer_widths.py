"""QFA on integers of a folder (`gossamer quantize --bits 2,3,4`): whose they are, subnets bit for bit, refusals."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.api import verbs
from gossamer.cli.quantize import quantize
from gossamer.data.tokenizer.byte import Bytes
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.model.qfa_linear import bit_widths, extract, qfa_layers, set_widths
from gossamer.model.quantized_folder import quantized_content
from gossamer.model.quantized_linear import quantized_layers
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.quantized_folder import write_quantized
from model.tiny import SIZES, VOCABULARY, batch

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 30
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
GROUP = 32


def model_in(folder: Path, kind: str, config: dict[str, Any], seed: int = 0) -> Path:
    origin = origin_of(ModelSection(hf=kind, config=config)).fitted_to_tokenizer(VOCABULARY, 256)
    export_hf(origin.build(seed), origin, Bytes(), folder)
    return folder


def quantized(model: Path, bits: Any, out: Path | None, **more: Any) -> dict[str, Any]:
    text = model.parent / "text.txt"
    text.write_text(TEXT)
    return verbs.quantize(
        model, bits=bits, data=[text], sequence=32, calibration=16, out=out, **{"group": GROUP, **more}
    )


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # nn.Linear; Conv1D, whose weight lies turned
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its integers of three widths, and what the command said of them."""
    here = tmp_path_factory.mktemp(request.param)
    config = {**SIZES, "intermediate_size": 72} if request.param == "llama" else GPT2
    model_in(here / "model", request.param, config)
    (here / "said.json").write_text(json.dumps(quantized(here / "model", (2, 3, 4), here / "integers")))
    return here


def section(place: Path, **more: Any) -> ModelSection:
    given = {"rank": 2, "group": GROUP, "integers": str(place / "integers"), **more}
    return ModelSection(hf=str(place / "model"), adapter={"qfa": given})


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module.eval()(**batch()).logits
    return found


def test_the_integers_of_a_width_are_those_of_a_model_quantized_to_it_alone(place: Path, tmp_path: Path) -> None:
    supernet, plain = (origin_of(section(place, integers=one)).build(0) for one in (str(place / "integers"), ""))
    said = json.loads((place / "said.json").read_text())
    assert said["file_bytes"] == sum(
        layer.held(bits).weight_blocks.nbytes + layer.held(bits).weight_scales.nbytes  # type: ignore[union-attr, misc]
        for layer in qfa_layers(supernet).values()
        for bits in (2, 3, 4)
    )
    for bits, told in zip((2, 3, 4), said["widths"], strict=True):
        alone = quantized(place / "model", bits, tmp_path / str(bits))
        same = ("bits", "bytes_after", "bits_per_weight", "loss_before", "loss_after", "layers")
        assert {key: told[key] for key in same} == {key: alone[key] for key in same}
        module = origin_of(ModelSection(hf=str(tmp_path / str(bits)))).build(0)
        wanted = quantized_layers(module)
        assert wanted.keys() == qfa_layers(supernet).keys()
        for name, layer in qfa_layers(supernet).items():
            held = layer.held(bits)
            assert torch.equal(held.weight_blocks, wanted[name].weight_blocks), name
            assert torch.equal(held.weight_scales, wanted[name].weight_scales), name  # type: ignore[arg-type]
        rounded = qfa_layers(plain).items()
        assert not all(torch.equal(one.held(bits).weight_blocks, wanted[name].weight_blocks) for name, one in rounded)
        set_widths(supernet, (bits,) * len(wanted))
        assert torch.equal(logits(supernet), logits(module))  # B is 0


def test_a_subnet_computes_what_the_supernet_does_bit_for_bit_also_from_its_folder(place: Path, tmp_path: Path) -> None:
    origin = origin_of(section(place))
    module = origin.build(0)
    generator = torch.Generator().manual_seed(1)
    for layer in qfa_layers(module).values():
        for _, tensor in layer.slots():
            tensor.data.normal_(0, 0.1, generator=generator)
    chosen = bit_widths(module).near(2.6, random.Random(0))
    set_widths(module, chosen)
    expected = logits(module)
    extract(module, chosen)
    assert torch.equal(logits(module), expected)
    content = quantized_content(module, origin, Bytes(), method="qfa", said={}, dtype=torch.float32)
    write_quantized(tmp_path / "out", content)
    again = origin_of(ModelSection(hf=str(tmp_path / "out"))).build(0)
    assert torch.equal(logits(again), expected)


def test_other_integers_are_another_base(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place / "integers", tmp_path / "integers")
    given = str(tmp_path / "integers")
    before = origin_of(section(place)).base_digest(0)
    assert origin_of(section(place, integers=given)).base_digest(0) == before  # moved, not changed
    assert origin_of(section(place, integers="")).base_digest(0) != before
    monkeypatch.chdir(place)
    near = origin_of(section(place, integers="integers"))
    monkeypatch.chdir(tmp_path / "integers")  # as after a run was read in its own folder
    assert near.base_digest(0) == before
    file = tmp_path / "integers" / "integers.json"
    file.write_text(file.read_text().replace('"calibration_tokens": ', '"calibration_tokens": 1'))
    assert origin_of(section(place, integers=given)).base_digest(0) != before


@pytest.mark.parametrize("place", ["llama"], indirect=True)
def test_a_folder_that_does_not_fit_is_refused(place: Path, tmp_path: Path) -> None:
    quantized(place / "model", (3, 4), tmp_path / "narrow", by="round_to_nearest")
    shutil.copytree(place / "integers", tmp_path / "few")
    head = json.loads((tmp_path / "few" / "integers.json").read_text())
    head["layers"].remove("model.layers.1.mlp.up_proj")
    (tmp_path / "few" / "integers.json").write_text(json.dumps(head))
    for given, said in (
        ({"group": 64}, r"groups of 64 \(model.adapter.qfa.group\), got groups of 32"),
        ({"integers": str(tmp_path / "narrow")}, r"integers of 2 bits .*, got those of 3, 4 bits"),
        ({"integers": str(tmp_path / "few")}, r"integers of model.layers.1.mlp.up_proj.*, got those of 13 other"),
        ({"integers": str(tmp_path / "none")}, r"got no integers.json there"),
    ):
        with pytest.raises(BadInput, match=said) as caught:
            origin_of(section(place, **given)).build(0)
        assert caught.value.key == "model.adapter.qfa.integers"
    origin_of(section(place, integers=str(tmp_path / "few"), targets=["q_proj"])).build(0)
    with pytest.raises(BadInput, match=r"with the model.dtype of its weights"):
        origin_of(section(place).model_copy(update={"dtype": "bfloat16"})).build(0)
    model = model_in(tmp_path / "model", "llama", {**SIZES, "intermediate_size": 72}, seed=1)
    other = section(place).model_copy(update={"hf": str(model)})
    with pytest.raises(BadInput, match=r"got other values in model.embed_tokens.weight"):
        origin_of(other).build(0)
    wide = model_in(tmp_path / "wide", "llama", {**SIZES, "intermediate_size": 72, "num_hidden_layers": 3})
    with pytest.raises(BadInput, match=r"got model.layers.2.\S+, which that model does not have"):
        origin_of(section(place).model_copy(update={"hf": str(wide)})).build(0)


@pytest.mark.parametrize("place", ["llama"], indirect=True)
def test_a_folder_that_was_changed_is_not_loaded(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "integers", tmp_path / "integers")
    file = tmp_path / "integers" / "integers.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    given = section(place, integers=str(tmp_path / "integers"))
    with pytest.raises(BadInput, match="with other data"):
        origin_of(given).build(0)
    head = tmp_path / "integers" / "integers.json"
    head.write_text(head.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(BadInput, match="wanted format 1 in"):
        origin_of(given).build(0)


@pytest.mark.parametrize("place", ["llama"], indirect=True)
def test_several_widths_that_are_refused_before_anything_is_computed(place: Path, tmp_path: Path) -> None:
    for bits, more, said in (
        ((4, 2), {}, "several widths, rising"),
        ((4,), {}, "several widths, rising"),
        ((2, 9), {}, "2 to 8"),
        ((2, 4), {"by": {"gptq": {"bits": 3}}}, "in one place"),
        ((2, 4), {"budget": 3.0}, "leave --bits out, or --budget"),
        ((2, 4), {"symmetric": True}, "grids with a minimum"),
        ((2, 4), {"out": tmp_path / "out.gguf"}, "name a folder"),
        ((2, 4), {"out": place / "integers"}, "which exists"),
    ):
        given: dict[str, Any] = {"out": tmp_path / "out", **more}
        with pytest.raises(BadInput, match=said):
            quantized(place / "model", bits, **given)
    with pytest.raises(BadInput, match="calibration text"):
        verbs.quantize(place / "model", bits=(2, 4))
    with pytest.raises(BadInput, match="a number, or several"):
        quantize(place / "model", bits="2;4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["llama"], indirect=True)
def test_the_command_says_size_and_losses_of_each_width(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = quantize(
        place / "model", str(place / "text.txt"), bits="2,8", group=GROUP, out=out, sequence=32, calibration=4
    )
    found = made.data["widths"]
    assert [one["bits"] for one in found] == [2, 8]
    two, eight = (abs(one["loss_after"] - one["loss_before"]) for one in found)
    assert eight < two and found[0]["bytes_after"] < found[1]["bytes_after"] < made.data["bytes_before"]
    assert (
        f"{found[0]['loss_after']:.5f}" in made.text
        and f"{{qfa: {{integers: {out}, group: 32, widths: [2, 8]}}}}" in made.text
    )
