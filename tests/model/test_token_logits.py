"""Logits with a cache: those of the whole sequence, for every family, or the cache is not used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.generate import TokenChoice, continued
from gossamer.model.source.hf import Hf
from gossamer.model.token_logits import Cached, Recomputed, TokenLogits, token_logits
from model.tiny import CONFIGS, SIZES, Plain

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": CONFIGS["gpt2"],
    "qwen2": SIZES,
    "gemma": SIZES | {"head_dim": 8},
    "gemma3_text": SIZES | {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
    "mistral": SIZES | {"sliding_window": 8},
    "gpt_neox": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": CONFIGS["mamba"],
}


def module_of(family: str, **more: Any) -> nn.Module:
    """A model whose logits depend on the context: with the usual small weights they hardly would."""
    module = Hf(family, FAMILIES[family] | more).fitted_to_tokenizer(257, 256).build(0).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return module


def whole(module: nn.Module, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


@contextmanager
def lengths(module: nn.Module) -> Iterator[list[int]]:
    """The tokens of every forward in this context."""
    found: list[int] = []

    def note(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        found.append(given["input_ids"].shape[1])

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    yield found
    hook.remove()


def tokens(logits: TokenLogits, ids: list[int], *, temperature: float = 0.0) -> list[int]:
    """40 tokens after `ids`."""
    choice, generator = TokenChoice(temperature=temperature), torch.Generator().manual_seed(0)
    return list(continued(ids, lambda seen: choice.draw(logits.after(seen), generator), tokens=40, window=60))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_those_of_the_whole_sequence(family: str) -> None:
    module = module_of(family)
    cached = token_logits(module)
    assert isinstance(cached, Cached) and not cached.uncached
    plain = Recomputed(module, cached.whole.caller, "")
    assert tokens(cached, [5, 6, 7, 8]) == tokens(plain, [5, 6, 7, 8])
    expected = tokens(plain, [9, 6, 7, 8], temperature=1.0)
    with lengths(module) as computed:
        assert tokens(cached, [9, 6, 7, 8], temperature=1.0) == expected
    assert computed == [4] + [1] * 39 and len(set(expected)) > 4
    dialogue = [9, 6, 7, 8, *expected]
    for ids in ([*dialogue, 9, 10, 11], [*dialogue, 9, 10, 12], [*dialogue[:20], 13], [*dialogue[:20], 13], [4]):
        assert torch.allclose(cached.after(ids), whole(module, ids), atol=1e-4)


def test_only_new_tokens_are_computed() -> None:
    cached = token_logits(module := module_of("llama"))
    with lengths(module) as computed:
        for ids in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 9], [8, 2]):
            cached.after(ids)
    assert computed == [3, 2, 1, 1, 2]


@pytest.mark.parametrize("family", ["mamba", "mistral"])
def test_a_state_that_cannot_be_cut_back_is_built_anew(family: str) -> None:
    cached = token_logits(module := module_of(family))
    ids = list(range(1, 13))  # longer than the sliding window
    cached.after([*ids, 40])
    with lengths(module) as computed:
        found = cached.after([*ids, 41])
    assert computed == [13] and torch.allclose(found, whole(module, [*ids, 41]), atol=1e-4)


def test_a_cache_that_changes_logits_is_not_used() -> None:
    from transformers import LlamaForCausalLM

    class Forgets(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
            return super().forward(input_ids=input_ids, use_cache=use_cache)

    class Fails(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
            assert past_key_values is None, "no past here"
            return super().forward(input_ids=input_ids, use_cache=use_cache)

    module = module_of("llama")
    for kind, said in ((Forgets, "its logits differ by"), (Fails, "AssertionError: no past here")):
        other = kind(module.config).eval()
        other.load_state_dict(module.state_dict())
        found = token_logits(other)
        assert isinstance(found, Recomputed) and said in found.uncached
        assert torch.allclose(found.after([1, 2, 3]), whole(module, [1, 2, 3]))


def test_a_module_of_ones_own_is_computed_whole() -> None:
    found = token_logits(Plain().eval())
    assert isinstance(found, Recomputed) and "Plain keeps no cache" in found.uncached


def test_positions_that_change_with_the_length_are_not_cached_beyond_it() -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    module = module_of("llama", max_position_embeddings=16, rope_parameters=scaled)
    cached = token_logits(module)
    assert isinstance(cached, Cached) and cached.limit == 16
    for length in (10, 16, 17, 18, 30):
        ids = list(range(1, length + 1))
        assert torch.allclose(cached.after(ids), whole(module, ids), atol=1e-4)


def test_an_interrupted_forward_leaves_no_cache_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = token_logits(module := module_of("llama"))
    cached.after([1, 2, 3])
    last: Any = module.model.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cached.after([1, 2, 3, 4])
    assert torch.allclose(cached.after([1, 2, 3, 4]), whole(module, [1, 2, 3, 4]), atol=1e-4)
