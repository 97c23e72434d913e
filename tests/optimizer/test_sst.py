"""Sparse spectral training against its equations: decompositions without loss, frozen pairs, sampling, state bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer.sst import Sst, _Decomposition, chances, drawn, tangent
from gossamer.plan import Request, build
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

SHAPES = {"layers.0.up.weight": (12, 5), "layers.0.down.weight": (5, 12), "layers.0.square.weight": (8, 8)}
Tensors = dict[str, torch.Tensor]


def some(seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator, dtype=dtype) for n, shape in SHAPES.items()}


def step(rule: Sst, params: Tensors, state: Any, number: int, *, rate: float = 1.0) -> None:
    grads = some(100 + number, next(iter(params.values())).dtype)
    rule.update(params, grads, state, lr_scale=rate, step=number)


def parts(state: Any, name: str, rank: int) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in _Decomposition.of(state[name], SHAPES[name], rank).held.items()}


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-14), (torch.float32, 3e-6)])
def test_no_decomposition_distorts_the_matrix(dtype: torch.dtype, within: float) -> None:
    """At the first step and at those that begin a round, with a rate so small that nothing else moves."""
    rule, params = Sst(rank=3, interval=2, lr=1e-30), some(0, dtype)
    before, state = {n: p.clone() for n, p in params.items()}, rule.init(params)
    for number in range(13):  # rounds have 2, 2 and 3 iterations
        step(rule, params, state, number)
        for name, param in params.items():
            assert (param - before[name]).abs().max() < within * before[name].abs().max() * (number + 1)
            held = parts(state, name, 3)
            made = (held["left"] * held["values"]) @ held["right"].t()
            assert torch.equal(made, param)


def test_inside_an_iteration_frozen_columns_keep_their_bits() -> None:
    rule, params = Sst(rank=3, interval=4, warmup=0, lr=0.01), some(0)
    state = rule.init(params)
    for number in range(12):
        before = {name: parts(state, name, 3) for name in SHAPES}
        step(rule, params, state, number)
        for name in SHAPES:
            held, old = parts(state, name, 3), before[name]
            active = held["active_pairs"].long() - 1
            frozen = torch.ones(held["values"].numel(), dtype=torch.bool)
            frozen[active] = False
            moved = (held["left"] != old["left"]).any(0) | (held["right"] != old["right"]).any(0)
            assert bool((held["values"] >= 0).all())
            if number % 4:
                assert torch.equal(held["active_pairs"], old["active_pairs"])
                assert not bool(moved[frozen].any()) and bool(moved[active].all())
            torch.testing.assert_close(held["left"][:, active].norm(dim=0), torch.ones(3, dtype=torch.float64))
            torch.testing.assert_close(held["right"][:, active].norm(dim=0), torch.ones(3, dtype=torch.float64))


def test_a_new_sample_begins_with_empty_moments_of_vectors() -> None:
    rule, params = Sst(rank=3, interval=4, warmup=2, lr=0.01), some(0)
    state, name = rule.init(params), "layers.0.square.weight"
    for number in range(9):
        step(rule, params, state, number)
        held = parts(state, name, 3)
        if number in (0, 4, 8):  # one step of (1 - b1) g since they were empty
            grad = some(100 + number)[name]
            assert held["left_mean"].abs().max() <= 0.1001 * (grad @ held["right"]).abs().max() * 2
            count = (held["left_square"].sum() / held["left_mean"].square().sum()).item()
            assert count == pytest.approx((1 - 0.999) / (1 - 0.9) ** 2)
    assert bool(held["values_mean"].any())


def test_the_gradients_are_those_of_autograd_but_for_the_factor_of_the_values() -> None:
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(d, 4, generator=generator, dtype=torch.float64).requires_grad_() for d in (7, 6))
    s = torch.rand(4, generator=generator, dtype=torch.float64).add(0.1).requires_grad_()
    w = (u * s) @ v.t()
    w.retain_grad()
    (w.sin() * torch.arange(42.0, dtype=torch.float64).view(7, 6)).sum().backward()
    g = w.grad
    assert g is not None and u.grad is not None and v.grad is not None
    torch.testing.assert_close((u * (g @ v)).sum(0), s.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((g @ v) * s, u.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((g.t() @ u) * s, v.grad, rtol=1e-12, atol=1e-12)
    unit = (u / u.norm(dim=0)).detach()
    assert (unit * tangent(unit, u.grad)).sum(0).abs().max() < 1e-12


def test_a_step_is_its_equations() -> None:
    """The first step of Adam is that of signs; written out for all pairs active."""
    rule, params = Sst(rank=8, interval=5, warmup=0, lr=0.02, eps=1e-30), some(0)
    name = "layers.0.square.weight"
    w, g = params[name].clone(), some(100)[name]
    step(rule, params, rule.init(params), 0)
    u, s, vt = torch.linalg.svd(w)
    v = vt.t()
    after = [x - 0.02 * tangent(x, y).sign() for x, y in ((u, g @ v), (v, g.t() @ u))]
    u2, v2 = (x / x.norm(dim=0) for x in after)
    s2 = (s - 0.02 * (u * (g @ v)).sum(0).sign()).clamp(min=0)
    torch.testing.assert_close(params[name], (u2 * s2) @ v2.t(), rtol=1e-12, atol=1e-12)


def test_pairs_are_drawn_as_often_as_their_chance() -> None:
    chance = chances(torch.tensor([5.0, 2.0, 1.0, 0.5, 0.0]))
    assert chance.sum() == pytest.approx(1) and chance.min() == pytest.approx(0.1)
    counts = torch.zeros(5)
    for number in range(4000):
        counts[drawn(chance, 1, (0, "w", number))] += 1
    assert (counts / 4000 - chance).abs().max() < 4 * (0.25 / 4000) ** 0.5
    twice = drawn(chance, 3, (0, "w", 7))
    assert torch.equal(twice, drawn(chance, 3, (0, "w", 7))) and len(set(twice.tolist())) == 3
    assert drawn(chance, 5, (1, "w", 0)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("shape", "rank"), [((64, 64), 8), ((96, 32), 4), ((32, 96), 4)])
def test_moments_take_the_bytes_of_the_paper(shape: tuple[int, int], rank: int) -> None:
    state = Sst(rank=rank).init({"up.weight": torch.zeros(shape)})["up.weight"]
    moments = sum(one.nbytes for slot, one in state.items() if slot.endswith(("_mean", "_square")))
    m = min(shape)
    wanted = 8 * (m + rank * sum(shape))
    assert wanted <= moments <= wanted + 6 * 4 * shape[0]  # tensors in A rows, the last one filled up
    assert shape[0] != shape[1] or moments == wanted
    assert Sst(rank=rank).row_bytes("up.weight", shape) * shape[0] == sum(one.nbytes for one in state.values())


def test_it_goes_on_from_its_state_bit_for_bit_inside_an_iteration() -> None:
    rule = Sst(rank=3, interval=4, lr=0.01)
    straight = some(0)
    state = rule.init(straight)
    for number in range(6):
        step(rule, straight, state, number)
    broken, again = {n: p.clone() for n, p in straight.items()}, rule.init(straight)
    for name, slots in state.items():
        for slot, value in slots.items():
            again[name][slot].copy_(value)
    for number in range(6, 12):
        step(rule, straight, state, number)
        step(rule, broken, again, number)
    assert all(torch.equal(straight[n], broken[n]) for n in SHAPES)


def test_a_low_rank_fit_learns_beyond_its_rank() -> None:
    """Rounds of one pair at a time reach a matrix of full rank, which a sum of few pairs does not."""
    generator = torch.Generator().manual_seed(5)
    goal = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0]
    params = {"w": 0.3 * torch.randn(8, 8, generator=generator)}
    rule = Sst(rank=2, interval=10, warmup=2, lr=0.02)
    state = rule.init(params)
    for number in range(600):
        rule.update(params, {"w": params["w"] - goal}, state, lr_scale=1 - number / 600, step=number)
    assert (params["w"] - goal).square().sum() < 0.05 * goal.square().sum()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"rank": 0}, "rank"),
        ({"interval": 0}, "interval"),
        ({"rest": "sst"}, "one point"),
        ({"rest": "schedule_free_sgd"}, "one point"),
        ({"matrices": ["("]}, "regular expression"),
    ],
)
def test_bad_settings_are_named(written: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        optimizer_methods.build({"sst": written})
    for outer in ("static_mask", "proximal"):
        with pytest.raises(BadInput, match="inner"):
            optimizer_methods.build({outer: {"inner": "sst"}})


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"sync": "diloco"}, "follow from the states"),
        ({"sharding": "zero1"}, "whole: true"),
        ({"sharding": {"zero2": {"whole": True}}}, ""),
    ],
)
def test_what_cannot_be_combined_is_said(plan: dict[str, Any], said: str) -> None:
    config = RunConfig.model_validate({"plan": plan, "train": {"batch": 8, "optimizer": "sst"}})
    if not said:
        build("data_parallel").plan(Request(config, 2))
        return
    with pytest.raises(BadInput, match=said):
        build("data_parallel").plan(Request(config, 2))
