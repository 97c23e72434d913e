"""Half-type parameters with a float32 master: no small step is lost."""

from __future__ import annotations

import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer.adamw import AdamW
from gossamer.optimizer.master import Master
from gossamer.optimizer.sgd import SGD


def test_small_steps_add_up() -> None:
    """1000 steps of 1e-4 from 1.0: bf16 alone cannot move (its neighbors of 1 are 0.004 away), the master does."""
    moved = {}
    for rule in (SGD(lr=1e-4), Master(inner=SGD(lr=1e-4))):
        params = {"w": torch.ones(3, 5, dtype=torch.bfloat16)}
        state = rule.init(params)
        for step in range(1000):
            rule.update(params, {"w": torch.ones(3, 5)}, state, lr_scale=1.0, step=step)
        moved[type(rule)] = params["w"][0, 0].item()
    assert moved[SGD] == 1.0 and abs(moved[Master] - 0.9) < 2**-8


def test_follows_the_float32_run() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 9, generator=generator).bfloat16()
    plain, half = {"w": start.float()}, {"w": start.clone()}
    rule = optimizer_methods.build({"master": {"adamw": {"lr": 0.01}}})
    assert rule == Master(inner=AdamW(lr=0.01)) and rule.lr == 0.01
    states = rule.inner.init(plain), rule.init(half)
    assert "master" not in rule.init(plain)["w"]
    for step in range(10):
        grads = {"w": torch.randn(7, 9, generator=generator)}
        rule.inner.update(plain, grads, states[0], lr_scale=1.0, step=step)
        rule.update(half, grads, states[1], lr_scale=1.0, step=step)
    assert torch.equal(states[1]["w"]["master"], plain["w"]) and torch.equal(half["w"], plain["w"].bfloat16())
    assert {t.dtype for t in states[1]["w"].values()} == {torch.float32}


def test_changes_no_bit_of_float32() -> None:
    params = [{"w": torch.linspace(-1, 1, 40).view(8, 5)} for _ in range(2)]
    rules = AdamW(), Master(inner=AdamW())
    states = [rule.init(p) for rule, p in zip(rules, params, strict=True)]
    for step in range(5):
        for rule, p, state in zip(rules, params, states, strict=True):
            rule.update(p, {"w": p["w"] * 3 - step}, state, lr_scale=0.7, step=step)
    assert torch.equal(params[0]["w"], params[1]["w"]) and states[1]["w"].keys() == states[0]["w"].keys()
