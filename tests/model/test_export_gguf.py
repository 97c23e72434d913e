"""Models as GGUF files: what comes back by `model.gguf`, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.data.tokenizer import parse_tokenizer
from gossamer.data.tokenizer.byte import Bytes
from gossamer.model.export_gguf import export_gguf
from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.quantize_base import quantize_base
from gossamer.model.source.gguf import Gguf
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.gguf import read_summary
from model.tiny import CONFIGS, SIZES, Plain, batch

pytest.importorskip("gguf")
TOKENIZER = Bytes()
ROPE = {"rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 16}),
    "linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}, "max_position_embeddings": 64}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
}


def made(name: str, **more: Any) -> nn.Module:
    """A model whose norms and biases are no longer those it begins with."""
    kind, config = EXPORTED[name]
    section = ModelSection(hf=kind, config={**SIZES, **config, **more})
    module = origin_of(section).fitted_to_tokenizer(257, 256).build(1).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1, 0.2, generator=generator)
    return module


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = caller_of(module)(module, batch(sequence=48)).logits
    return found


def back(file: Path) -> nn.Module:
    return origin_of(ModelSection(gguf=str(file))).build(0).eval()


@pytest.mark.parametrize("name", EXPORTED)
def test_a_model_comes_back_as_it_was_up_to_rounding_to_float16(name: str, tmp_path: Path) -> None:
    module = made(name)
    export_gguf(module, None, TOKENIZER, tmp_path / "out.gguf")
    again = back(tmp_path / "out.gguf")
    theirs = dict(again.named_parameters())
    for key, ours in module.named_parameters():
        assert torch.equal(theirs[key], ours if ours.ndim == 1 else ours.half().float()), key
    assert (logits(module) - logits(again)).abs().max() < 1e-3


def test_frequencies_survive_also_where_positions_are_beyond_the_original_context(tmp_path: Path) -> None:
    plain, scaled = made("llama"), made("llama3")
    scaled.load_state_dict(plain.state_dict())
    assert (logits(plain) - logits(scaled)).abs().max() > 1e-3  # the test can tell them apart
    export_gguf(scaled, None, TOKENIZER, tmp_path / "out.gguf")
    assert (logits(scaled) - logits(back(tmp_path / "out.gguf"))).abs().max() < 1e-3


def test_eight_bits_are_half_as_large_and_close(tmp_path: Path) -> None:
    module = made("llama")
    wide = export_gguf(module, None, TOKENIZER, tmp_path / "wide.gguf")
    small = export_gguf(module, None, TOKENIZER, tmp_path / "small.gguf", kind="q8_0")
    assert small["bytes"] < 0.65 * wide["bytes"] and not small["notes"]
    assert read_summary(tmp_path / "small.gguf").tensors == {"Q8_0": 16, "F32": 5}
    for (key, ours), theirs in zip(module.named_parameters(), back(tmp_path / "small.gguf").parameters(), strict=True):
        blocks = ours.detach().reshape(-1, 32).abs().amax(-1, keepdim=True)
        if ours.ndim > 1:
            assert ((ours - theirs).reshape(-1, 32).abs() <= blocks * (0.57 / 127)).all(), key


def test_matrices_of_odd_width_stay_float16_and_this_is_said(tmp_path: Path) -> None:
    module = made("llama", hidden_size=40, intermediate_size=64)
    notes = export_gguf(module, None, TOKENIZER, tmp_path / "out.gguf", kind="q8_0")["notes"]
    assert "stay float16" in notes[0]
    assert read_summary(tmp_path / "out.gguf").tensors == {"F16": 14, "F32": 5, "Q8_0": 2}


def test_a_sliding_window_limits_the_context(tmp_path: Path) -> None:
    notes = export_gguf(made("mistral", sliding_window=20), None, TOKENIZER, tmp_path / "out.gguf")["notes"]
    assert "20, the sliding window" in notes[0]
    assert read_summary(tmp_path / "out.gguf").context == 20


def test_a_quantized_base_is_exported_as_what_it_decodes_to(tmp_path: Path) -> None:
    module = made("llama")
    quantize_base(module, "int8")
    export_gguf(module, None, TOKENIZER, tmp_path / "out.gguf")
    ours: Any = module.get_submodule("model.layers.1.self_attn.k_proj")
    theirs: Any = back(tmp_path / "out.gguf").get_submodule("model.layers.1.self_attn.k_proj")
    assert torch.equal(ours.weight.half().float(), theirs.weight)


@pytest.mark.parametrize("written", ["byte", "bpe:400"])
def test_the_tokenizer_comes_back(written: str, tmp_path: Path) -> None:
    texts = ["In 1969, they said: it's 4567 words and  spaces\n\n\tcaf\u00e9 \U0001f578 <|endoftext|>"] * 9
    tokenizer = parse_tokenizer(written).make(lambda: texts, identity="t", cache=tmp_path)
    export_gguf(made("llama", vocab_size=400), None, tokenizer, tmp_path / "out.gguf")
    again = parse_tokenizer(f"hf:{tmp_path / 'out.gguf'}").make(lambda: (), identity="", cache=tmp_path)
    assert again.encode(texts[0]).tolist() == tokenizer.encode(texts[0]).tolist()
    assert again.separator == tokenizer.separator


def test_an_existing_target_stays_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_text("mine")
    with pytest.raises(BadInput, match="which exists"):
        export_gguf(made("llama"), None, TOKENIZER, target)
    assert target.read_text() == "mine"


def test_a_refusal_midway_leaves_no_file(tmp_path: Path) -> None:
    module: Any = made("llama")
    module.model.layers[1].mlp.up_proj.weight.data[3, 4] = 1e6
    with pytest.raises(BadInput, match=r"F16 can hold in blk\.1\.ffn_up\.weight, got values up to 1e\+06"):
        export_gguf(module, None, TOKENIZER, tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


def refused(module: nn.Module, tmp_path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        export_gguf(module, None, TOKENIZER, tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())
    return str(caught.value)


def test_what_llama_cpp_has_no_proved_equal_of_is_refused_by_name(tmp_path: Path) -> None:
    assert "model.tiny.Plain" in refused(Plain(), tmp_path)
    gpt2 = origin_of(ModelSection(hf="gpt2", config=CONFIGS["gpt2"])).build(0)
    assert "GPT2LMHeadModel" in refused(gpt2, tmp_path)
    assert "hidden_act" in refused(made("llama", hidden_act="gelu"), tmp_path)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rope_type default, linear" in refused(made("llama", rope_parameters=dynamic), tmp_path)
    assert "llama3" in refused(made("qwen2", rope_parameters=LLAMA3), tmp_path)
    other = {**ROPE, "rope_type": "yarn", "attention_factor": 1.5}
    assert "a rotary embedding" in refused(made("llama", rope_parameters=other), tmp_path)
    module: Any = made("llama")
    module.model.layers[0].self_attn.q_norm = nn.LayerNorm(8)
    assert "model.layers.0.self_attn.q_norm.weight" in refused(module, tmp_path)


def test_a_forward_of_ones_own_is_refused(tmp_path: Path) -> None:
    module: Any = made("llama")

    class Own(type(module)):  # type: ignore[misc]
        pass

    module.__class__ = Own
    assert "Own" in refused(module, tmp_path)


def test_a_file_with_a_tensor_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    module: Any = made("llama", attention_bias=True)
    export_gguf(module, None, TOKENIZER, tmp_path / "out.gguf")
    file = tmp_path / "out.gguf"
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_q.bias", b"blk.1.attn_q.bond"))
    with pytest.raises(BadInput, match=r"blk\.1\.attn_q\.bond"):
        back(file)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_blocks_of_a_file_are_kept_as_they_are(kind: Any, tmp_path: Path) -> None:
    export_gguf(made("biases"), None, TOKENIZER, tmp_path / "out.gguf", kind=kind)
    source = Gguf(of=str(tmp_path / "out.gguf"))
    plain, blocks = source.build(0).eval(), source.build_in_blocks(0).eval()
    for name in ("q_proj", "k_proj", "o_proj"):  # rows permuted, rows of fewer heads, rows in order
        one: Any = blocks.get_submodule(f"model.layers.1.self_attn.{name}")
        other: Any = plain.get_submodule(f"model.layers.1.self_attn.{name}")
        assert one.format.type == kind.upper() and torch.equal(one.weight, other.weight)
        assert torch.equal(one.bias, other.bias) and not one.bias.requires_grad
    assert torch.equal(logits(plain), logits(blocks))
