"""The V-cycle's operators: shrinking what was grown gives it back; wider models compute the same; mixtures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gossamer import grow
from gossamer.spec.errors import BadInput
from grow.grow_models import Plain, fill, gpt2, grown, llama, logits, spread_out, state, task_of

WIDE_LLAMA = {"hidden_size": 48, "intermediate_size": 72, "num_key_value_heads": 4, "num_attention_heads": 8}
CASES = [
    (gpt2, {}, {"n_embd": 48, "n_head": 8}),  # tied
    pytest.param(llama, {}, WIDE_LLAMA, marks=pytest.mark.nightly),
    (llama, {"tie_word_embeddings": True}, {**WIDE_LLAMA, "tie_word_embeddings": True}),
    (Plain, {}, {"width": 72, "heads": 8, "hidden": 108}),
]


@pytest.mark.parametrize(("make", "small", "large"), CASES)
def test_widening_is_lossless_with_a_tied_head_too(make: Any, small: Any, large: Any) -> None:
    source, target, _ = grown(make, small, large, "de_coalesce")
    assert float((logits(source) - logits(target)).abs().max()) < 1e-12


@pytest.mark.parametrize(("make", "small", "large"), CASES)
def test_coalescing_what_was_de_coalesced_gives_it_back(make: Any, small: Any, large: Any) -> None:
    depth = {"n_layer": 4} if make is gpt2 else {"layers": 4} if make is Plain else {"num_hidden_layers": 4}
    source, target, _ = grown(make, small, {**large, **depth}, "de_coalesce")
    back = grow.build("coalesce").grow(task_of(target, make(**small).double())).tensors
    for name, tensor in state(source).items():
        assert torch.allclose(back[name], tensor, atol=1e-14, rtol=1e-13), name


def test_coalescing_a_model_takes_means_of_writers_and_sums_of_readers() -> None:
    source, target, _ = grown(Plain, {"width": 48, "hidden": 72, "layers": 4}, {"layers": 2}, "coalesce")
    small, large = state(target), state(source)
    blocks = (large["blocks.0.up.weight"] + large["blocks.1.up.weight"]) / 2
    expected = (blocks[:36] + blocks[36:]) / 2
    assert torch.allclose(small["blocks.0.up.weight"], expected[:, :24] + expected[:, 24:])
    assert torch.allclose(small["embed.weight"], (large["embed.weight"][:, :24] + large["embed.weight"][:, 24:]) / 2)


def test_grown_duplicates_get_equal_gradients_and_mixtures_do_not() -> None:
    def duplicates(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(32).view(2, 16)
        cross_entropy(module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        grad = module.blocks[0].up.weight.grad
        assert grad is not None
        return grad[:36], grad[36:]

    source, target, _ = grown(Plain, {}, {"hidden": 72}, "de_coalesce")
    first, second = duplicates(target)
    assert torch.allclose(first, second, rtol=1e-10)
    before = state(spread_out(Plain(hidden=72), seed=5).double())
    task = task_of(source, Plain(hidden=72).double(), before=before)
    mixed = fill(Plain(hidden=72).double(), grow.build({"interpolate": {"alpha": 0.25}}).grow(task))
    first, second = duplicates(mixed)
    assert not torch.allclose(first, second, rtol=0.1)


def test_a_mixture_of_0_is_the_model_before_and_of_1_the_grown_one() -> None:
    source, target, _ = grown(Plain, {}, {"width": 48, "layers": 4}, "de_coalesce")
    before = state(spread_out(Plain(width=48, layers=4), seed=5).double())
    task = task_of(source, target, before=before)
    for alpha, expected in ((0.0, before), (1.0, state(target))):
        found = grow.build({"interpolate": {"alpha": alpha}}).grow(task).tensors
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    half = grow.build({"interpolate": {"alpha": 0.5}}).grow(task).tensors["head.bias"]
    assert torch.allclose(half, (before["head.bias"] + state(target)["head.bias"]) / 2)


@pytest.mark.parametrize(
    ("small", "large", "by", "said"),
    [
        ({}, {"width": 40}, "de_coalesce", "multiple of the smaller one's 24.*set it to 24 or 48.*lemon"),
        ({}, {"layers": 3}, "de_coalesce", "set it to 2 or 4"),
        ({}, {"heads": 6}, "de_coalesce", "heads"),
        ({}, {"width": 48}, "coalesce", "a target that is smaller than its source"),
        ({"width": 48}, {}, "de_coalesce", "a target that is larger than its source"),
        ({}, {"width": 48}, "interpolate", "before it was coalesced.*got none"),
    ],
)
def test_what_cannot_be_grouped_is_refused_by_name(small: Any, large: Any, by: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        grown(Plain, small, large, by)


def test_settings_out_of_their_limits_are_refused() -> None:
    with pytest.raises(BadInput, match="alpha"):
        grow.build({"interpolate": {"alpha": 1.5}})
