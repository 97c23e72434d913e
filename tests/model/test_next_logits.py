from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.next_logits import CachedLogits, RecomputedLogits, next_logits_of
from gossamer.model.source.hf import Hf
from model.tiny import SIZES, Plain

IDS = torch.randint(0, 257, (40,), generator=torch.Generator().manual_seed(5)).tolist()
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
    "qwen2": SIZES,
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": SIZES | {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 2},
    "gemma3_text": SIZES | {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 7},
    "mistral": SIZES | {"sliding_window": 8, "head_dim": 8},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


def model(kind: str) -> nn.Module:
    return Hf(kind, KINDS[kind]).fitted_to_tokenizer(257, 256).build(0).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logits_are_those_of_the_whole_window(kind: str) -> None:
    module = model(kind)
    cached, whole = next_logits_of(module), RecomputedLogits(module)
    assert cached.has_cache
    before, ids = cached.computed, list(IDS[:3])
    for _ in range(24):  # three sliding windows
        expected, found = whole.after(ids), cached.after(ids)
        assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert found.argmax() == expected.argmax()
        ids.append(int(expected.argmax()))
    assert cached.computed - before == len(ids) - 1 < whole.computed


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_is_added_and_taken_back(kind: str) -> None:
    module = model(kind)
    cached, whole = next_logits_of(module), RecomputedLogits(module)
    for ids in (IDS[:20], IDS[:31], IDS[:31], [*IDS[:15], 1, 2, 3], IDS[:9], IDS[20:24]):
        expected = whole.after(ids)
        assert torch.allclose(cached.after(ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_only_what_is_new_is_computed() -> None:
    reader = next_logits_of(model("llama"))
    counts = []
    for ids in (IDS[:20], IDS[:25], IDS[:25], [*IDS[:10], 1, 2], [3]):
        before = reader.computed
        reader.after(ids)
        counts.append(reader.computed - before)
    assert counts == [20, 5, 1, 2, 1]


def test_an_interrupted_forward_leaves_no_half_written_cache() -> None:
    module = model("llama")
    reader, whole = next_logits_of(module), RecomputedLogits(module)
    reader.after(IDS[:10])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = module.model.layers[1].register_forward_pre_hook(interrupt)  # type: ignore[union-attr, index]
    with pytest.raises(KeyboardInterrupt):
        reader.after(IDS[:11])
    handle.remove()
    assert torch.allclose(reader.after(IDS[:12]), whole.after(IDS[:12]), atol=1e-5)


class Forgets(nn.Module):
    """A transformers model whose cache is of no use: it attends to the new tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model("llama")
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, use_cache: bool = True, past_key_values: Any = None) -> Any:
        found = self.inner(input_ids, use_cache=True)
        return found


class Raises(Forgets):
    def forward(self, input_ids: Tensor, use_cache: bool = True, past_key_values: Any = None) -> Any:
        if past_key_values is not None:
            raise ValueError("no cache here")
        return self.inner(input_ids, use_cache=use_cache)


@pytest.mark.parametrize("kind", [Forgets, Raises, Plain])
def test_where_a_cache_is_not_equal_there_is_none(kind: type[nn.Module]) -> None:
    module = kind().eval()
    reader = next_logits_of(module)
    assert not reader.has_cache
    assert torch.equal(reader.after(IDS[:9]), RecomputedLogits(module).after(IDS[:9]))


def test_half_precision_has_a_cache_too() -> None:
    assert isinstance(next_logits_of(model("llama").to(torch.bfloat16)), CachedLogits)


def test_in_training_mode_there_is_no_cache() -> None:
    assert not next_logits_of(model("llama").train()).has_cache
