"""Static masks: exact counts, the same part everywhere, zeros that stay, and what may not be combined with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.optimizer.master import Master
from gossamer.optimizer.static_mask import StaticMask
from gossamer.plan import Request, build
from gossamer.recipe.own_loop_check import check_loop
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

CPU = torch.device("cpu")
SHAPES = {"layers.0.up.weight": (13, 7), "layers.0.up.bias": (13,), "embed.weight": (11, 7), "lm_head.weight": (11, 7)}


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (40, 25), (0, 3)])
def test_every_matrix_has_the_exact_count(sparsity: float, shape: tuple[int, int]) -> None:
    draw, numel = StaticMaskDraw(sparsity=sparsity, seed=4), shape[0] * shape[1]
    kept = draw.kept("w", shape, CPU)
    assert kept.shape == shape and int(kept.sum()) == draw.kept_count("w", shape) == numel - round(sparsity * numel)


def test_a_mask_is_a_function_of_seed_and_name_that_never_changes() -> None:
    draw = StaticMaskDraw(sparsity=0.5, seed=1)
    # Fixed for ever: a run that is resumed, and a host with another torch, must draw the same.
    assert draw.kept("a", (4, 8), CPU).int().tolist() == [
        [0, 1, 0, 0, 1, 0, 0, 1],
        [0, 1, 0, 0, 1, 1, 0, 1],
        [1, 1, 0, 1, 0, 1, 1, 0],
        [0, 1, 0, 0, 1, 1, 1, 0],
    ]
    assert torch.equal(draw.kept("a", (4, 8), CPU), draw.kept("a", (4, 8), CPU))
    others = [draw.kept("b", (4, 8), CPU), StaticMaskDraw(sparsity=0.5, seed=2).kept("a", (4, 8), CPU)]
    assert not any(torch.equal(draw.kept("a", (4, 8), CPU), other) for other in others)


def test_rows_and_columns_are_masked_alike() -> None:
    kept = StaticMaskDraw(sparsity=0.75, seed=0).kept("w", (400, 300), CPU).float()
    assert (kept.mean(0) - 0.25).abs().max() < 6 * (0.25 * 0.75 / 400) ** 0.5
    assert (kept.mean(1) - 0.25).abs().max() < 6 * (0.25 * 0.75 / 300) ** 0.5


def test_embeddings_heads_and_vectors_are_dense_and_patterns_choose_others() -> None:
    assert [name for name, shape in SHAPES.items() if StaticMask().mask.covers(name, shape)] == ["layers.0.up.weight"]
    chosen = StaticMask(parameters=("embed", r"bias$")).mask
    assert [name for name, shape in SHAPES.items() if chosen.covers(name, shape)] == [
        "layers.0.up.bias",
        "embed.weight",
    ]


@pytest.mark.parametrize(
    "inner", ["adamw", {"sgd": {"momentum": 0.9}}, "muon", "lamb", "adamw_8bit", "schedule_free_sgd"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zero_and_the_rest_moves_as_by_the_inner_rule(inner: Any, dtype: torch.dtype) -> None:
    rule = StaticMask(inner=optimizer_methods.build(inner), sparsity=0.5)
    around, alone = Master(inner=rule), Master(inner=rule.inner)
    params = drawn(dtype=dtype)
    around.prepare(params)
    zero = params["layers.0.up.weight"] == 0
    assert int(zero.sum()) == round(0.5 * 13 * 7)
    plain, states = {n: p.clone() for n, p in params.items()}, (around.init(params), alone.init(params))
    for step in range(4):
        grads = {n: g.float() for n, g in drawn(step + 1).items()}
        around.update(params, grads, states[0], lr_scale=1.0, step=step)
        grads["layers.0.up.weight"] = grads["layers.0.up.weight"].masked_fill(zero, 0)
        alone.update(plain, grads, states[1], lr_scale=1.0, step=step)
        plain["layers.0.up.weight"].masked_fill_(zero, 0)
        if "master" in states[1]["layers.0.up.weight"]:
            states[1]["layers.0.up.weight"]["master"].masked_fill_(zero, 0)
    assert bool((params["layers.0.up.weight"] == 0).eq(zero).all())
    assert all(torch.equal(params[n], plain[n]) for n in params)
    moments = {slot: one for slot, one in states[0]["layers.0.up.weight"].items() if slot in ("mean", "square")}
    assert all(bool((one[zero] == 0).all()) for one in moments.values() if one.is_floating_point())


def test_the_first_dense_step_moves_masked_weights() -> None:
    params = drawn()
    StaticMask().prepare(params)
    zero, inner = params["layers.0.up.weight"] == 0, optimizer_methods.build("adamw")
    inner.update(params, drawn(1), inner.init(params), lr_scale=1.0, step=0)
    assert bool((params["layers.0.up.weight"][zero] != 0).all())


def test_every_shard_has_its_own_rows_of_the_mask() -> None:
    rule, params = StaticMask(), drawn()
    whole = rule.init(params)["layers.0.up.weight"]["kept"]
    shapes = {name: tuple(one.shape) for name, one in params.items()}
    parts = []
    for start in range(0, 13, 5):
        rows = {name: one[start : start + 5] for name, one in params.items()}
        states = Master(inner=rule).init_rows(rows, shapes, dict.fromkeys(rows, start))
        parts.append(states["layers.0.up.weight"]["kept"])
    assert torch.equal(torch.cat(parts), whole)


def test_gradients_are_masked_before_their_norm_is_taken() -> None:
    rule, params = StaticMask(), drawn()
    state, grads = rule.init(params), drawn(1)
    rule.restrict(grads, state)
    kept = state["layers.0.up.weight"]["kept"] != 0
    assert torch.equal(grads["layers.0.up.weight"], drawn(1)["layers.0.up.weight"].masked_fill(~kept, 0))
    assert torch.equal(grads["embed.weight"], drawn(1)["embed.weight"])


def test_it_says_what_is_held_and_what_flop_that_saves() -> None:
    said = StaticMask(sparsity=0.5).said(SHAPES, flop_per_token=2 * 200.0)
    assert (
        said.startswith("static_mask: 46 of 91 weights in 1 matrices stay 0; ")
        and "would take 77.0 % of a step's flop" in said
    )
    with pytest.raises(BadInput, match="no trained parameter is a weight matrix"):
        StaticMask().said({"embed.weight": (3, 3)}, flop_per_token=0)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"sparsity": 1.0}, "sparsity"),
        ({"sparsity": -0.1}, "sparsity"),
        ({"parameters": ["("]}, "regular expression"),
        ({"inner": {"static_mask": {}}}, "without a mask"),
        ({"inner": "eva"}, "single parameters"),
    ],
)
def test_bad_settings_are_named(written: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        optimizer_methods.build({"static_mask": written})
    with pytest.raises(BadInput, match=r"static_mask: \{inner: muon\}"):
        optimizer_methods.build({"muon": {"rest": "static_mask"}})


def test_an_own_loop_has_no_masked_optimizer() -> None:
    with pytest.raises(BadInput, match="the optimizer of your own loop moves all weights"):
        check_loop(exchange={"warmup": {"inner": "static_mask"}}, max_grad_norm=0.0)


TIERS = {"tiers": {"device": "64MB", "host": "64MB", "file": "64MB", "directory": "/tmp"}}
OTHER = {"static_mask": {"seed": 1}}


@pytest.mark.parametrize(
    ("plan", "train", "said"),
    [
        ({"sharding": "sdp4bit"}, {}, "rounds weight updates"),
        ({"sync": {"diloco": {"exchange": {"two_shot": "int4"}}}}, {}, "averages of weights are not 0"),
        ({"sync": "gossip"}, {}, "averages of weights are not 0"),
        ({"sync": {"diloco": {"exchange": OTHER}}}, {}, "seed 1 and the same parameters"),
        ({"sync": "diloco"}, {}, ""),
        ({"sync": {"diloco": {"exchange": "static_mask"}}}, {}, ""),
        ({"sync": "just_one_byte"}, {}, "sgd without momentum"),
        ({"exchange": OTHER}, {}, "seed 1 and the same parameters"),
        ({"exchange": "static_mask"}, {"optimizer": "adamw"}, "train.optimizer static_mask with sparsity 0.75"),
        ({"exchange": {"error_feedback": "static_mask"}}, {}, "static_mask around other exchanges"),
        ({"exchange": {"powersgd": {"p_exchange": "static_mask"}}}, {}, "static_mask around other exchanges"),
        ({"exchange": "dense"}, {"verify": {"every": 5}}, "mean gradients of all weights"),
        ({"exchange": "static_mask", "adapt": {"l_greco": {}}}, {}, "a codec that the policy can vary"),
        ({"exchange": "static_mask", "adapt": {"l_greco": {"candidates": ["static_mask", "dense"]}}}, {}, "no policy"),
        ({"exchange": "dense", "adapt": {"l_greco": {"candidates": [OTHER, "dense"]}}}, {}, "no policy"),
        ({"sync": {"diloco": {"exchange": "static_mask"}}, "adapt": "bcrs"}, {}, "no policy"),
        ({"sharding": TIERS}, {}, "model states in tiers"),
        ({"exchange": "static_mask", "sharding": "zero1"}, {}, ""),
        ({"exchange": {"static_mask": {"inner": {"error_feedback": "topk"}}}}, {}, ""),
        ({"exchange": [["layers", "all", "static_mask"], [".*", "all", "dense"]]}, {}, ""),
    ],
)
def test_what_cannot_be_combined_is_said(plan: dict[str, Any], train: dict[str, Any], said: str) -> None:
    train = {"batch": 8, "optimizer": "static_mask", **train}
    config = RunConfig.model_validate({"plan": {"lossy": False, **plan}, "train": train})
    ranks = 1 if "tiers" in str(plan) else 4
    if not said:
        build("data_parallel").plan(Request(config, ranks))
        return
    with pytest.raises(BadInput, match=said):
        build("data_parallel").plan(Request(config, ranks))
