from pathlib import Path

import pytest
import torch

from gossamer.data import open_corpus

llama = pytest.importorskip("transformers.models.llama")
modelling = pytest.importorskip("transformers.models.llama.modeling_llama")


def test_isolated_documents_do_not_see_each_other(tmp_path: Path) -> None:
    """The logits of packed documents are those of each document alone, in an unmodified Llama."""
    texts = ["the first text", "second", "and a third one"]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    length = sum(len(text) + 1 for text in texts)
    settings = {"source": f"text:{tmp_path}/in/*", "sequence": length, "validation": 0, "cache": tmp_path / "cache"}
    isolated = open_corpus(**settings, isolate=True).train.batch([0])
    together = open_corpus(**settings).train.batch([0])
    torch.manual_seed(0)
    config = llama.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    model = modelling.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        apart = torch.cat(
            [model(input_ids=torch.tensor([[*text.encode(), 256]])).logits for text in texts], dim=1
        )  # (1, length, 257)
        assert (model(**isolated).logits - apart).abs().max() < 1e-5
        assert (model(**together).logits - apart).abs().max() > 1e-3
