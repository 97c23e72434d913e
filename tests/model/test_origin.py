"""Where models come from: what builds, and what is refused with which words."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.model.forward_adapter import caller_of
from gossamer.model.input_checks import check_sequence, check_vocabulary
from gossamer.model.origin import origin_of
from gossamer.model.source import names
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS, SIZES, VOCABULARY, Plain, batch


def hf(of: str, **config: Any) -> ModelSection:
    return ModelSection(hf=of, config=config)


def refused(section: ModelSection, *words: str) -> None:
    with pytest.raises(BadInput) as caught:
        origin = origin_of(section)
        origin.vocabulary()
        origin.build(0)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    module: Any = origin_of(hf("llama", vocab_size=50, **SIZES)).build(3)
    module.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_relative_folder_is_the_same_one_in_another_current_folder(
    saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (saved / "generation_config.json").write_text("{}")
    monkeypatch.chdir(saved.parent)
    origin, whole = origin_of(hf("saved")), origin_of(hf(str(saved)))
    assert origin.has_weights
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert origin.fingerprint() == whole.fingerprint() and origin.files().keys() == whole.files().keys() != set()


def test_every_key_of_the_section_has_an_origin() -> None:
    assert set(names()) == {"hf", "gguf", "factory"} <= set(ModelSection.model_fields)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_type_builds_runs_and_gives_a_loss(kind: str) -> None:
    origin = origin_of(hf(kind, **CONFIGS[kind])).fitted_to_tokenizer(VOCABULARY, 256)
    assert origin.vocabulary() == VOCABULARY
    module = origin.build(0)
    loss = caller_of(module)(module, batch()).loss
    loss.backward()
    assert abs(loss.item() - np.log(VOCABULARY)) < 1.5
    assert module.training and module.config.eos_token_id == 256
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(grads) > 5 and all(g.isfinite().all() for g in grads)


def test_building_depends_on_the_seed_alone_and_disturbs_no_generator() -> None:
    origin = origin_of(hf("llama", vocab_size=50, **SIZES))
    first = origin.build(1)
    torch.rand(7), random.random(), np.random.rand()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    second, other = origin.build(1), origin.build(2)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert (before[2][1] == np.random.get_state()[1]).all()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_fingerprints_tell_models_apart() -> None:
    prints = [origin_of(hf("llama", vocab_size=v, **SIZES)).fingerprint() for v in (50, 50, 51)]
    assert prints[0] == prints[1] != prints[2]
    half = origin_of(ModelSection(hf="llama", config={"vocab_size": 50, **SIZES}, dtype="bfloat16"))
    assert half.fingerprint() != prints[0] and next(half.build(0).parameters()).dtype is torch.bfloat16


def test_suiting_keeps_what_was_written() -> None:
    origin = origin_of(hf("llama", vocab_size=300, eos_token_id=7, **SIZES)).fitted_to_tokenizer(VOCABULARY, 256)
    assert origin.vocabulary() == 300
    module: Any = origin.build(0)
    assert (module.config.eos_token_id, module.config.bos_token_id) == (7, 256)


def test_a_directory_loads_its_weights_whatever_the_seed(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("{}")
    origin = origin_of(hf(str(saved), attention_dropout=0.25))
    reference: Any = origin_of(hf("llama", vocab_size=50, **SIZES)).build(3)
    module: Any = origin.fitted_to_tokenizer(10, 9).build(99)
    assert module.training and module.config.attention_dropout == 0.25 and origin.vocabulary() == 50
    for a, b in zip(reference.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "its weights" in origin.describe() and "tokenizer.json" in origin.files()


def test_a_directory_without_weights_starts_from_random_ones(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    origin = origin_of(hf(str(saved)))
    assert "random weights" in origin.describe()
    a, b = origin.build(3), origin.build(3)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_pickles_are_not_opened(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    refused(hf(str(saved)), "pytorch_model.bin", "pickle", "safetensors")


def test_weights_that_are_cut_short_or_incomplete_are_refused(saved: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = saved / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    refused(hf(str(saved)), "model.norm.weight", "1 in all")
    file.write_bytes(file.read_bytes()[:-100])
    refused(hf(str(saved)), "model.hf")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (hf("llama", hidden_sze=64), ["model.config.hidden_sze", "'hidden_size'"]),
        (hf("llama", hidden_size="wide"), ["model.config", "hidden_size", "expected int"]),
        (hf("llama", hidden_size=30, num_attention_heads=4), ["30", "4"]),
        (hf("llama", num_hidden_layers=-1), ["num_hidden_layers", "-1"]),
        (hf("llama", dtype="bfloat16"), ["model.dtype"]),
        (hf("lama"), ["'lama'", "'llama'"]),
        (hf("t5"), ["t5", "factory"]),
        (hf("someone/some-model"), ["nothing is downloaded", "hf download someone/some-model"]),
        (hf("/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (ModelSection(), ["model.hf, model.gguf, model.factory", "none"]),
        (ModelSection(gguf="/nowhere.gguf"), ["model.gguf", "/nowhere.gguf"]),
        (ModelSection(factory="no_colon"), ["package.module:function", "no_colon"]),
        (ModelSection(factory="not_there_at_all:f"), ["not_there_at_all", "ModuleNotFoundError"]),
        (ModelSection(factory="model.tiny:plain"), ["'plain'", "'Plain'"]),
        (ModelSection(factory="model.tiny:Plain", config={"widht": 3}), ["widht", "'width'"]),
        (ModelSection(factory="model.tiny:Plain", config={"width": -3}), ["RuntimeError", "tiny.py:"]),
        (ModelSection(factory="model.tiny:batch"), ["nn.Module", "dict"]),
    ],
)
def test_what_is_refused(section: ModelSection, words: list[str]) -> None:
    refused(section, *words)


def test_directories_that_are_no_models(tmp_path: Path) -> None:
    refused(hf(str(tmp_path)), "config.json")
    (tmp_path / "config.json").write_text("{")
    refused(hf(str(tmp_path)), "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    refused(hf(str(tmp_path)), "model_type")
    refused(hf(str(tmp_path / "config.json")), "a directory")


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGML and then some")
    refused(ModelSection(gguf=str(file)), "x.gguf", "GGML")
    file.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\0" * 4)
    refused(ModelSection(gguf=str(file)), "x.gguf", "model.gguf")


def test_a_factory_builds_a_plain_module() -> None:
    origin = origin_of(ModelSection(factory="model.tiny:Plain", config={"width": 8}))
    assert origin.vocabulary() is None
    suited = origin.fitted_to_tokenizer(99, 98)
    assert suited.vocabulary() == 99 and "vocabulary=99" in suited.describe()
    a, b = suited.build(5), suited.build(5)
    assert isinstance(a, Plain) and all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_factory_beside_the_user_names_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_a.py").write_text("import torch\n\nraise OSError('no weights here')\n")
    refused(ModelSection(factory="mine_a:make"), "OSError: no weights here", "mine_a.py:3")
    (tmp_path / "mine_b.py").write_text("def make(:\n")
    refused(ModelSection(factory="mine_b:make"), "SyntaxError", "mine_b.py:1")
    (tmp_path / "mine_c.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 2)\n")
    assert isinstance(origin_of(ModelSection(factory="mine_c:make")).build(0), torch.nn.Linear)
    assert isinstance(sys.modules.pop("mine_c"), types.ModuleType)


def test_no_network_is_touched(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("connected to something")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    origin_of(hf(str(saved))).build(0)
    refused(hf("someone/some-model"), "nothing is downloaded")


def test_vocabularies_that_disagree() -> None:
    check_vocabulary(None, 257)
    check_vocabulary(257, 257)
    check_vocabulary(32000, 257)
    check_vocabulary(151936, 151669, has_weights=True)
    with pytest.raises(BadInput, match="256 token ids, the tokenizer byte gives 257"):
        check_vocabulary(256, 257, tokenizer="byte")
    with pytest.raises(BadInput, match="trained with another tokenizer"):
        check_vocabulary(32000, 257, has_weights=True)


def test_sequences_that_are_too_long() -> None:
    origin = origin_of(hf("gpt2", **CONFIGS["gpt2"]))
    check_sequence(origin.positions(), 64)
    with pytest.raises(BadInput, match="65 tokens, the model takes 64"):
        check_sequence(origin.positions(), 65)


def test_transformers_is_imported_only_when_needed() -> None:
    code = "import sys, gossamer.model.origin as o, gossamer.model.export, gossamer.model.generate\n"
    code += "from gossamer.spec.config import ModelSection\n"
    code += "o.origin_of(ModelSection(hf='llama')); o.origin_of(ModelSection(factory='a:b'))\n"
    code += "sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_digest_of_a_base_is_the_same_before_and_after_it_is_built() -> None:
    section = ModelSection(hf="llama", config=CONFIGS["llama"], adapter="lora")
    origin = origin_of(section)
    before = origin.base_digest(0)
    origin.build(0)
    assert origin.base_digest(0) == before == origin_of(section).base_digest(0) != origin.base_digest(1)
