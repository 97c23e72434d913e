from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.data.tokenizer.byte import Bytes
from gossamer.model.export import export_hf
from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.quantize_base import quantize_base
from gossamer.model.source import ModelSource
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS, SIZES, Plain, batch

TOKENIZER = Bytes()
MORE: dict[str, dict[str, Any]] = {
    "tied": SIZES | {"model_type": "llama", "tie_word_embeddings": True},
    "mixtral": SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1},
}


def built(kind: str, dtype: Any = "float32") -> tuple[nn.Module, ModelSource]:
    config = dict((CONFIGS | MORE)[kind])
    section = ModelSection(hf=config.pop("model_type", kind), config=config, dtype=dtype)
    origin = origin_of(section).fitted_to_tokenizer(257, 256)
    return origin.build(0), origin


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = caller_of(module)(module.eval(), batch()).logits
    return found


@pytest.mark.parametrize("kind", [*CONFIGS, *MORE])
def test_transformers_loads_what_was_trained(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, origin = built(kind)
    with torch.no_grad():
        for p in module.parameters():  # as if trained: nothing left at its initial zero or one
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.05)
    target = tmp_path / "out"
    export_hf(module, origin, TOKENIZER, target)
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded) is type(module) and torch.equal(logits(module), logits(loaded))
    assert AutoTokenizer.from_pretrained(target)("ab").input_ids == [97, 98]
    assert json.loads((target / "config.json").read_text())["architectures"] == [type(module).__name__]
    again = origin_of(ModelSection(hf=str(target))).build(5)
    assert torch.equal(logits(module), logits(again))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # nn.Linear; Conv1D, whose weight lies turned
def test_a_quantized_base_is_written_decoded(kind: str, tmp_path: Path) -> None:
    module, origin = built(kind)
    quantize_base(module, "int8")
    export_hf(module, origin, TOKENIZER, tmp_path / "out")
    again = origin_of(ModelSection(hf=str(tmp_path / "out"))).build(5)
    assert torch.allclose(logits(module), logits(again), rtol=0, atol=1e-6)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export_hf(*built("tied"), None, tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_the_type_is_kept(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    export_hf(*built("llama", "bfloat16"), None, tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.bfloat16


def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    origin = origin_of(ModelSection(factory="model.tiny:Plain", config={"width": 8}))
    module = origin.build(0)
    export_hf(module, origin, None, tmp_path / "out")
    other = Plain(width=8)
    load_model(other, tmp_path / "out" / "model.safetensors")
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "from model.tiny import Plain" in readme and "width=8" in readme
    code = readme.split("```python\n")[1].split("```")[0]
    exec(code.replace('"model.safetensors"', repr(str(tmp_path / "out" / "model.safetensors"))), {})


def test_an_existing_target_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(BadInput, match="out"):
        export_hf(*built("llama"), None, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_the_origins_tokenizer_stays_where_it_is_the_one_trained_with(tmp_path: Path) -> None:
    export_hf(*built("llama"), TOKENIZER, tmp_path / "first")
    settings = tmp_path / "first" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 77}))
    origin = origin_of(ModelSection(hf=str(tmp_path / "first")))
    export_hf(origin.build(0), origin, TOKENIZER, tmp_path / "same")
    assert json.loads((tmp_path / "same" / "tokenizer_config.json").read_text())["model_max_length"] == 77
    altered = tmp_path / "first" / "tokenizer.json"
    altered.write_text(altered.read_text().replace('"<|end|>"', '"<|stop|>"').replace('"!": 33', '"?!": 33'))
    export_hf(origin.build(0), origin, TOKENIZER, tmp_path / "other")
    assert "?!" not in (tmp_path / "other" / "tokenizer.json").read_text()
    assert json.loads((tmp_path / "other" / "tokenizer_config.json").read_text()).get("model_max_length") != 77
