"""Dynamic sparse tables: the budget never changes, the weakest go, the largest gradients come, alike everywhere."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer.dsl import Dsl
from gossamer.optimizer.master import Master
from gossamer.plan import Request, build
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

Tensors = dict[str, torch.Tensor]
TABLE = "item_embed.weight"


def some(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {TABLE: (30, 8), "tower.weight": (4, 8)}
    found = {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in shapes.items()}
    found[TABLE][seed % 5 :: 3] = 0  # rows that a batch does not name
    return found


def begun(rule: Dsl, dtype: torch.dtype = torch.float32) -> tuple[Tensors, Any]:
    params = some(0, dtype)
    params[TABLE] += 0.1
    rule.prepare(params)
    return params, Master(inner=rule).init(params)


@pytest.mark.parametrize("sparsity", [0.3, 0.75])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_budget_is_the_same_at_every_step(sparsity: float, dtype: torch.dtype) -> None:
    rule = Dsl(sparsity=sparsity, interval=3, steps=40, fraction=0.4)
    params, state = begun(rule, dtype)
    masks = []
    for step in range(45):
        Master(inner=rule).update(params, some(100 + step), state, lr_scale=1.0, step=step)
        kept = state[TABLE]["kept"] != 0
        masks.append(kept.clone())
        assert int(kept.sum()) == 240 - round(sparsity * 240)
        held = [params[TABLE], *(state[TABLE][slot] for slot in ("mean", "square"))]
        assert all(bool((one[~kept] == 0).all()) for one in held)
    changes = [not torch.equal(a, b) for a, b in pairwise(masks)]
    assert all((step + 2) % 3 == 0 and step + 2 < 40 for step, changed in enumerate(changes) if changed)
    assert sum(changes) > 8 and not torch.equal(masks[0], masks[-1])


def test_an_exploration_is_its_equations() -> None:
    rule = Dsl(inner=optimizer_methods.build({"sgd": {"lr": 0.1}}), sparsity=0.5, interval=2, steps=10, fraction=0.5)
    params, state = begun(rule)
    rule.update(params, some(1), state, lr_scale=1.0, step=0)
    grad = torch.randn(30, 8, generator=torch.Generator().manual_seed(7))
    kept, before = state[TABLE]["kept"].bool(), params[TABLE].clone()
    after = torch.where(kept, before - 0.1 * grad, 0)
    count = math.floor(0.5 * (1 + math.cos(math.pi * 2 / 10)) / 2 * 120)
    pruned = kept.clone().view(-1)
    order = after.abs().view(-1).masked_fill(~pruned, math.inf).argsort()
    pruned[order[:count]] = False
    grown = pruned.clone()
    order = grad.abs().view(-1).masked_fill(pruned, -1).argsort(descending=True)
    grown[order[:count]] = True
    assert grad.abs().view(-1)[order[count - 1]] > 0  # no ties among those that are grown
    rule.update(params, {TABLE: grad}, state, lr_scale=1.0, step=1)
    assert torch.equal(state[TABLE]["kept"].bool().view(-1), grown)
    torch.testing.assert_close(params[TABLE].view(-1), torch.where(pruned, after.view(-1), 0))


def test_ties_are_broken_by_the_seed_and_not_by_the_place() -> None:
    found = []
    for seed in (0, 0, 1):
        rule = Dsl(sparsity=0.5, interval=1, steps=10, fraction=0.5, seed=seed)
        params, state = begun(rule)
        rule.update(params, {TABLE: torch.zeros(30, 8)}, state, lr_scale=1.0, step=0)
        found.append(state[TABLE]["kept"].clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_it_goes_on_from_its_state_bit_for_bit() -> None:
    rule = Dsl(sparsity=0.5, interval=2, steps=20)
    straight, state = begun(rule)
    for step in range(5):
        rule.update(straight, some(100 + step), state, lr_scale=1.0, step=step)
    broken, again = {n: p.clone() for n, p in straight.items()}, rule.init(straight)
    for name, slots in state.items():
        for slot, value in slots.items():
            again[name][slot].copy_(value)
    for step in range(5, 12):
        rule.update(straight, some(100 + step), state, lr_scale=1.0, step=step)
        rule.update(broken, some(100 + step), again, lr_scale=1.0, step=step)
    assert all(torch.equal(straight[n], broken[n]) for n in straight)
    assert torch.equal(state[TABLE]["kept"], again[TABLE]["kept"])


def test_it_says_what_is_trained() -> None:
    said = Dsl(sparsity=0.75).said({TABLE: (30, 8), "tower.weight": (4, 8)}, flop_per_token=0)
    assert said == "dsl: 60 of 240 weights in 1 tables are trained at a time, the others are 0"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"sparsity": 1}, "sparsity"),
        ({"fraction": 1.0}, "fraction"),
        ({"interval": 0}, "interval"),
        ({"inner": "adamw_8bit"}, "states that are 0"),
        ({"inner": "schedule_free_sgd"}, "single parameters"),
        ({"inner": "static_mask"}, "single parameters"),
        ({"parameters": ["("]}, "regular expression"),
    ],
)
def test_bad_settings_are_named(written: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        optimizer_methods.build({"dsl": written})
    with pytest.raises(BadInput, match="no trained parameter has 'embed' in its name"):
        Dsl().check(["users.weight"])


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"sync": "diloco"}, "averages of weights are not 0"),
        ({"sharding": "zero1"}, "whole: true"),
        ({"exchange": "static_mask"}, "train.optimizer static_mask"),
        ({"sharding": {"zero1": {"whole": True}}}, ""),
    ],
)
def test_what_cannot_be_combined_is_said(plan: dict[str, Any], said: str) -> None:
    config = RunConfig.model_validate({"plan": plan, "train": {"batch": 8, "optimizer": "dsl"}})
    if not said:
        build("data_parallel").plan(Request(config, 2))
        return
    with pytest.raises(BadInput, match=said):
        build("data_parallel").plan(Request(config, 2))
