"""LEMON: the grown model computes what the small one computes, to the last digits; its moments follow its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gossamer import grow
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import BadInput
from grow.grow_models import VOCABULARY, Plain, bert, fill, gpt2, grown, llama, logits, neox, opt, qwen3, task_of

BIG = {"hidden_size": 40, "intermediate_size": 85, "num_hidden_layers": 5, "num_key_value_heads": 5}
BIG |= {"num_attention_heads": 10}
WIDER = {"hidden_size": 42, "num_attention_heads": 7, "num_hidden_layers": 3}
MORE = pytest.mark.nightly
UNTIED = {"tie_word_embeddings": False}
CASES = [
    (llama, {}, BIG, {}),  # RMSNorm, grouped heads, remainders everywhere, depth
    (llama, {"tie_word_embeddings": True}, {**BIG, "hidden_size": 60, "tie_word_embeddings": True}, {}),
    (gpt2, {}, {"n_embd": 60, "n_head": 10, "n_layer": 3}, {}),  # LayerNorm, Conv1D, fused, tied, positions
    (Plain, {}, {"width": 64, "layers": 5, "heads": 7, "hidden": 50}, {}),  # eps of its own, torch's attention
    (Plain, {}, {"width": 64, "layers": 5, "heads": 9, "hidden": 90}, {"depth": 2}),
]
MORE_CASES = [
    (llama, {}, {"hidden_size": 40}, {}),
    (llama, {}, {**BIG, "hidden_size": 50, "num_hidden_layers": 4}, {"depth": 2}),
    (llama, {}, {"num_attention_heads": 8}, {}),  # more query heads to a key-value head
    (llama, {}, {"num_hidden_layers": 3}, {}),
    (gpt2, {}, {"n_embd": 60, "n_head": 10, "n_layer": 4}, {"depth": 2}),
    (gpt2, UNTIED, {"n_embd": 60, "n_head": 10, **UNTIED}, {"spread": 0.0}),
    (qwen3, {}, BIG, {}),  # norms over the size of a head
    (neox, {}, {**WIDER, "intermediate_size": 50}, {}),
    (opt, {}, {**WIDER, "ffn_dim": 50}, {}),
    (bert, {}, {"hidden_size": 48, "num_attention_heads": 8, "intermediate_size": 50}, {}),
]


@pytest.mark.parametrize(
    ("make", "small", "large", "fields"), [*CASES, *(pytest.param(*one, marks=MORE) for one in MORE_CASES)]
)
def test_logits_are_equal_to_the_last_digits(make: Any, small: Any, large: Any, fields: Any) -> None:
    source, target, _ = grown(make, small, large, {"lemon": fields})
    assert float(logits(source).std()) > 0.1
    assert float((logits(source) - logits(target)).abs().max()) < 1e-12
    source, target = source.float(), target.float()
    assert float((logits(source) - logits(target)).abs().max()) < 1e-5


@pytest.mark.parametrize(("make", "large"), [(llama, {"hidden_size": 40}), (Plain, {"width": 40})])
def test_an_epsilon_that_is_not_scaled_is_seen(make: Any, large: Any) -> None:
    """The proof in float64 tells a forgotten epsilon from rounding, which float32 cannot."""
    source, _, found = grown(make, {}, large, "lemon")
    assert found.eps and all(e != norm.eps for e, norm in zip(found.eps.values(), task_norms(source), strict=True))
    unscaled = fill(make(**large).double(), found, eps=False)
    assert 1e-8 < float((logits(source) - logits(unscaled)).abs().max()) < 1e-2


def task_norms(module: nn.Module) -> list[Any]:
    from gossamer.model.structure.model import structure_of

    return [one for one in structure_of(module).norms if one.weight]


def grads(module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a loss, in evaluation mode and float64."""
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))
    out = module.eval()(ids)
    out = out if isinstance(out, torch.Tensor) else out.logits
    params = dict(module.named_parameters())
    found = torch.autograd.grad(cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), list(params.values()))
    return dict(zip(params, found, strict=True))


@pytest.mark.parametrize(
    ("make", "small", "large"),
    [
        (Plain, {}, {"width": 48, "heads": 7, "hidden": 50}),
        (Plain, {}, {"heads": 6, "hidden": 80}),
        (gpt2, {}, {"n_embd": 48, "n_head": 8}),
    ],
)
def test_moments_are_those_of_the_grown_gradients(make: Any, small: Any, large: Any) -> None:
    """With equal shares the maps give the grown model's gradients exactly: m by the factors, v by their squares."""
    torch.manual_seed(0)
    source, target = make(**small).double(), make(**large).double()
    small_grads = grads(source)
    moments = {f"mean/{n}": g for n, g in small_grads.items()} | {f"square/{n}": g**2 for n, g in small_grads.items()}
    task = task_of(source, target, moments=moments, degrees={"mean": 1, "square": 2})
    found = grow.build({"lemon": {"spread": 0.0}}).grow(task)
    for name, g in grads(fill(target, found)).items():
        scale = float(g.abs().max())
        assert torch.allclose(found.moments[f"mean/{name}"].double(), g, atol=3e-6 * scale, rtol=1e-5), name
        assert torch.allclose(found.moments[f"square/{name}"].double(), g**2, atol=3e-6 * scale**2, rtol=1e-5), name


def test_moments_of_units_are_exact_with_unequal_shares_too() -> None:
    torch.manual_seed(0)
    source, target = Plain().double(), Plain(heads=7, hidden=50).double()
    moments = {f"mean/{n}": g for n, g in grads(source).items()}
    found = grow.build("lemon").grow(task_of(source, target, moments=moments, degrees={"mean": 1}))
    for name, g in grads(fill(target, found)).items():
        assert torch.allclose(found.moments[f"mean/{name}"].double(), g, atol=3e-6 * float(g.abs().max())), name


def test_moments_of_new_blocks_start_anew() -> None:
    source, target = Plain(), Plain(layers=4)
    moments = {f"mean/{n}": torch.ones_like(p) for n, p in source.named_parameters()}
    found = grow.build("lemon").grow(task_of(source, target, moments=moments, degrees={"mean": 1})).moments
    sums = [float(found[f"mean/blocks.{i}.up.weight"].sum()) for i in range(4)]
    assert sums[0] == sums[2] > 0 == sums[1] == sums[3]


def test_duplicates_are_equal_before_and_differ_after_one_step() -> None:
    """Of the hidden units, unit 0 is there as number 36 too; readers tell the two apart."""
    _, target, _ = grown(Plain, {}, {"hidden": 80}, "lemon")
    rows = target.blocks[0].up.weight
    assert torch.equal(rows[0], rows[36])
    params, rule = dict(target.named_parameters()), AdamW(lr=1e-3)
    rule.update(params, grads(target), rule.init(params), lr_scale=1.0, step=0)
    readers = target.blocks[0].down.weight
    assert not torch.equal(readers[:, 0], readers[:, 36])
    rule.update(params, grads(target), rule.init(params), lr_scale=1.0, step=0)
    assert not torch.equal(rows[0], rows[36])


def test_new_blocks_of_type_2_are_not_zero_and_give_zero() -> None:
    _, target, _ = grown(Plain, {}, {"width": 48, "heads": 8, "hidden": 72, "layers": 4}, {"lemon": {"depth": 2}})
    x = torch.randn(1, 5, 48, dtype=torch.float64)
    with torch.no_grad():
        assert float((target.blocks[1](x) - x).abs().max()) < 1e-12
        assert float((target.blocks[0](x) - x).abs().max()) > 0.01
        assert float(target.blocks[1].out.weight.abs().max()) > 0.01


@pytest.mark.parametrize(
    ("make", "small", "large", "fields", "said"),
    [
        (Plain, {}, {"width": 20}, {}, "a target that is larger than its source"),
        (Plain, {}, {"width": 20, "hidden": 400}, {}, "residual stream that is no narrower"),
        (Plain, {}, {"hidden": 30, "layers": 9}, {}, "at least as many hidden units as the source, 36, got 30"),
        (Plain, {}, {"heads": 2, "hidden": 99}, {}, "at least as many heads"),
        (Plain, {}, {"layers": 4}, {"depth": 2}, "set depth: 1"),
        (llama, {}, {"vocab_size": 60}, {}, "the same vocabulary in both models.*50.*60"),
        (llama, {}, {"head_dim": 8}, {}, "the same head size in both models"),
        (gpt2, {}, {"n_positions": 128}, {}, "the same positions in both models"),
        (llama, {"tie_word_embeddings": True}, {"hidden_size": 48}, {}, "lm_head.weight"),
        (llama, {}, {"hidden_size": 48, "attention_bias": True}, {}, "q_proj.bias of the target.*no such parameter"),
    ],
)
def test_what_cannot_be_grown_is_refused_by_name(make: Any, small: Any, large: Any, fields: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        grown(make, small, large, {"lemon": fields})


def test_settings_out_of_their_limits_are_refused() -> None:
    with pytest.raises(BadInput, match="spread"):
        grow.build({"lemon": {"spread": 1.0}})


def test_squares_of_new_blocks_are_their_sources_mean() -> None:
    """Updates are counted on: with squares of 0 the first ones would be several times as large."""
    source, target = Plain(), Plain(layers=4)
    moments = {f"square/{n}": torch.rand_like(p) for n, p in source.named_parameters()}
    found = grow.build("lemon").grow(task_of(source, target, moments=moments, degrees={"square": 2})).moments
    for new, old in ((1, 0), (3, 1)):
        mean = moments[f"square/blocks.{old}.up.weight"].mean()
        assert torch.allclose(found[f"square/blocks.{new}.up.weight"], mean.expand(36, 24))
    assert all(bool((one > 0).all()) for one in found.values())
