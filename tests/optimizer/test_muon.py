"""Muon against torch's own, against singular values, and by the names of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer.muon import Muon, orthogonalized
from gossamer.spec.errors import BadInput

SHAPES = {"layers.0.up.weight": (48, 16), "layers.0.down.weight": (16, 48), "layers.0.square.weight": (24, 24)}
Tensors = dict[str, torch.Tensor]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def moved(rule: optimizer_methods.Optimizer, params: Tensors, steps: int = 5) -> Tensors:
    params = {name: one.clone() for name, one in params.items()}
    state = rule.init(params)
    shapes = {name: tuple(one.shape) for name, one in params.items()}
    for step in range(steps):
        rule.update(params, drawn(shapes, 10 + step), state, lr_scale=1 / (1 + step), step=step)
    return params


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "theirs"), [("match_rms", "match_rms_adamw"), ("original", "original")])
def test_in_bfloat16_it_is_that_of_torch_bit_for_bit(nesterov: bool, scale: str, theirs: str) -> None:
    params = {name: nn.Parameter(one) for name, one in drawn(SHAPES, 1).items()}
    given: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    rule = Muon(**given, scale=scale, dtype="bfloat16")  # type: ignore[arg-type]
    ours = moved(rule, drawn(SHAPES, 1))
    other = torch.optim.Muon(list(params.values()), **given, adjust_lr_fn=theirs)
    for step in range(5):
        for group in other.param_groups:
            group["lr"] = 0.02 / (1 + step)
        for name, grad in drawn(SHAPES, 10 + step).items():
            params[name].grad = grad
        other.step()
    assert all(torch.equal(ours[name], params[name].detach()) for name in SHAPES)


@pytest.mark.parametrize("shape", [(64, 64), (16, 200), (200, 16), (1, 9)])
def test_an_orthogonal_factor_has_the_directions_of_the_exact_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    wanted = (sizes / sizes.norm()).double()
    for _ in range(5):  # a step on the matrix is this one on each singular value
        wanted = 3.4445 * wanted - 4.775 * wanted**3 + 2.0315 * wanted**5
    inside = left.t() @ orthogonalized(matrix, 5, torch.float32) @ right.t()  # diagonal: the same singular vectors
    values = inside.diagonal()
    assert torch.allclose(values.double(), wanted, atol=1e-4)
    assert values[sizes > 0.05 * sizes.norm()].min() > 0.6 and values.max() < 1.25
    assert (inside - values.diag()).abs().max() < 1e-4
    assert torch.equal(orthogonalized(torch.zeros(shape), 5, torch.float32), torch.zeros(shape))


def test_an_update_is_as_long_as_one_of_adamw() -> None:
    """Root mean square about 0.2 of the rate, whatever the shape (arXiv:2502.16982)."""
    before = drawn({"a": (64, 64), "b": (32, 256), "c": (256, 32)}, 1)
    after = moved(Muon(lr=1.0, weight_decay=0.0), before, steps=1)
    for name, one in after.items():
        assert (one - before[name]).square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_fused_projections_move_part_by_part() -> None:
    q, k, v = drawn({"q": (16, 16), "k": (16, 16), "v": (16, 16)}, 5).values()
    rule = Muon(fused=(("qkv", 3, 0), ("turned", 3, 1)))
    apart, state = {"q": q, "k": k, "v": v}, None
    fused = {"qkv.weight": torch.cat([q, k, v]), "turned.weight": torch.cat([q.t(), k.t(), v.t()], 1)}
    grads = drawn({"q": (16, 16), "k": (16, 16), "v": (16, 16)}, 6)
    state = rule.init(apart)
    rule.update(apart, grads, state, lr_scale=1.0, step=0)
    whole = {
        "qkv.weight": torch.cat(list(grads.values())),
        "turned.weight": torch.cat([one.t() for one in grads.values()], 1),
    }
    rule.update(fused, whole, rule.init(fused), lr_scale=1.0, step=0)
    wanted = torch.cat(list(apart.values()))
    assert torch.allclose(fused["qkv.weight"], wanted, atol=1e-6)
    turned = torch.cat([one.t() for one in fused["turned.weight"].chunk(3, 1)])
    assert torch.allclose(turned, wanted, atol=1e-5)


def test_parts_may_be_of_several_sizes() -> None:
    """Of 4 query heads to a key-value head; three equal parts would mix them, so they are not taken for granted."""
    shapes = {"q": (32, 32), "k": (8, 32), "v": (8, 32)}
    apart, grads = drawn(shapes, 5), drawn(shapes, 6)
    fused, whole = ({"qkv_proj.weight": torch.cat(list(one.values()))} for one in (apart, grads))
    rule = Muon(fused=(("qkv", (4, 1, 1), 0),))
    rule.update(apart, grads, rule.init(apart), lr_scale=1.0, step=0)
    rule.update(fused, whole, rule.init(fused), lr_scale=1.0, step=0)
    assert torch.allclose(fused["qkv_proj.weight"], torch.cat(list(apart.values())), atol=1e-6)
    assert optimizer_methods.build({"muon": {"fused": [["qkv", [4, 1, 1], 0]]}}) == rule
    for wrong in (Muon(), Muon(fused=(("qkv", (4, 1), 0), ("o", 1, 0)))):
        with pytest.raises(BadInput, match=r"dimension 0 of qkv_proj\.weight that divides by its"):
            wrong.init(fused)
    with pytest.raises(BadInput, match=r"parts >= 1 along dimension 0 or 1 for 'qkv'"):
        Muon(fused=(("qkv", (), 0),))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *(("tok_emb.weight", False), ("shared.weight", False), ("mlp.shared_expert_gate.weight", False)),
        *(("mlp.shared_expert.gate_proj.weight", True), ("assembly.weight", True), ("shared.up.weight", True)),
        *(("block.0.SelfAttention.relative_attention_bias.weight", False), ("mlp.gate.weight", False)),
    ],
)
def test_names_of_tables_and_routers_are_not_those_of_matrices(name: str, is_one: bool) -> None:
    assert (name in Muon().guessed({name: (8, 8)})) == is_one
    assert (name in optimizer_methods.build("static_mask").guessed({name: (8, 8)})) == is_one


def test_matrices_are_told_by_their_names() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 4}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small))
    rule = Muon()
    state = rule.init(dict(gpt2.named_parameters()))
    matrices = {name.removeprefix("transformer.h.0.") for name, slots in state.items() if set(slots) == {"momentum"}}
    assert matrices == {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
    shapes = {name: tuple(one.shape) for name, one in gpt2.named_parameters()}
    # c_attn is three matrices of 8 by 8, c_proj one, the two of the mlp 8 by 32
    assert rule.flop(shapes) == 5 * (4 * (4 * 8**3 + 2 * 8**3) / 1 + 2 * (4 * 64 * 32 + 2 * 8**3))
    assert set(state["transformer.wte.weight"]) == {"mean", "square"}


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(BadInput, match=r"wanted matrices, which have two dimensions.*got norm\.weight with 1"):
        Muon(matrices=("norm",)).init({"norm.weight": torch.zeros(3)})
    with pytest.raises(BadInput, match="no trained parameter has 'upp' in its name"):
        Muon(matrices=("upp",)).check(["up.weight"])
    with pytest.raises(BadInput, match=r"wanted a dimension 0 of qkv\.weight that divides by its 3 parts"):
        moved(Muon(), {"qkv.weight": torch.ones(4, 4)}, 1)
    with pytest.raises(BadInput, match="is no regular expression"):
        Muon(matrices=("(",))
    with pytest.raises(BadInput, match="wanted another optimizer"):
        Muon(rest=Muon())


def test_a_forecast_counts_one_state_of_a_matrix_and_two_of_the_rest() -> None:
    assert Muon().row_bytes("up.weight", (4, 3)) == 12 and Muon().row_bytes("embed.weight", (4, 3)) == 24
    assert Muon().row_bytes("up.bias", (4,)) == 8
    assert optimizer_methods.build("one_bit_lamb").row_bytes("up.weight", (4, 3)) == 36
