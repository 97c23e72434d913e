from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gossamer.spec.errors import BadInput, RunFailed
from gossamer.store.huggingface import export_directory

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def test_one_file_beside_config_tokenizer_and_card(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 4).t(), "a": torch.ones((), dtype=torch.bfloat16)}
    (tmp_path / "vocab").write_bytes(b"words")
    files = {"tokenizer.json": b"{}", "vocab.txt": tmp_path / "vocab"}
    size = export_directory(tmp_path / "deep" / "out", tensors, CONFIG, files)
    folder = tmp_path / "deep" / "out"
    assert size == 50
    assert sorted(os.listdir(folder)) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt",
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    assert (folder / "vocab.txt").read_bytes() == b"words"
    assert "LlamaForCausalLM" in (folder / "README.md").read_text()
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_several_shards_have_an_index_that_finds_every_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((100 * i,), float(i)) for i in range(6)}
    export_directory(tmp_path / "out", iter(tensors.items()), CONFIG, max_shard_bytes=1300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6000 and index["weight_map"].keys() == tensors.keys()
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i + 1:05d}-of-00004.safetensors" for i in range(4)]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == shards
    for name, shard in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / shard)[name], tensors[name])


def test_tied_weights_are_written_once_and_equal_ones_are_not_taken_for_tied(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5, 5))
    tensors = {"embed": weight, "norm": torch.ones(5), "other_norm": torch.ones(5), "head": weight, "view": weight.t()}
    export_directory(tmp_path / "out", tensors, CONFIG)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"embed", "norm", "other_norm", "view"}

    def passing() -> Iterator[tuple[str, Tensor]]:  # each freed before the next is made: likely in the same memory
        for i in range(50):
            yield f"t{i}", torch.full((1000,), float(i))

    export_directory(tmp_path / "passing", passing(), CONFIG, max_shard_bytes=4000)
    assert len(list((tmp_path / "passing").glob("*.safetensors"))) == 50


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match=r"a new folder to export into, got .*out, which exists: name another folder"):
        export_directory(tmp_path / "out", {}, CONFIG)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="which exists"):
        export_directory(tmp_path / "file", {}, CONFIG)
    for name in ("../x", "config.json", "model.safetensors", "a/b"):
        with pytest.raises(BadInput, match="plain names"):
            export_directory(tmp_path / "new", {}, CONFIG, {name: b""})
    assert not (tmp_path / "new").exists()


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(10)
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match=r"out was not written: No space left on device \(.*B free\)"):
        export_directory(tmp_path / "out", failing(), CONFIG, max_shard_bytes=8)
    with pytest.raises(BadInput, match="complex128"):
        export_directory(tmp_path / "out", {"a": torch.ones(1, dtype=torch.complex128)}, CONFIG)
    assert os.listdir(tmp_path) == []


def test_transformers_loads_it_with_equal_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    written = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    named = model.named_parameters(remove_duplicate=False)
    export_directory(tmp_path / "out", named, written, max_shard_bytes=4000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
