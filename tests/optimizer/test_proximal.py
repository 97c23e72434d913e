"""Proximal operators against a search over a grid in float64, and the optimizer that applies them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer import proximal_operator
from gossamer.optimizer.master import Master
from gossamer.optimizer.proximal_operator.group_lasso import GroupLasso
from gossamer.plan import Request, build
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

# Each with steps on both sides of the one from which the penalty is no longer convex enough.
ELEMENTWISE: list[Any] = [
    {"l1": {"strength": 0.7}},
    {"l2": {"strength": 0.7}},
    {"elastic_net": {"strength": 0.5, "ridge": 0.3}},
    {"l0": {"strength": 0.4}},
    {"scad": {"strength": 0.6, "shape": 3.0}},
    {"scad": {"strength": 0.6, "shape": 2.2}},
    {"mcp": {"strength": 0.6, "gamma": 1.5}},
    {"mcp": {"strength": 0.9, "gamma": 0.4}},
    {"log_sum": {"strength": 0.5, "scale": 0.3}},
    {"log_sum": {"strength": 0.5, "scale": 2.0}},
    {"capped_l1": {"strength": 0.6, "cap": 0.8}},
]
STEPS = (0.05, 0.7, 1.0, 1.4, 2.5, 6.0)


def objective(operator: proximal_operator.ProximalOperator, x: torch.Tensor, v: torch.Tensor, step: float) -> Any:
    return operator.penalty(x) + (x - v).square() / (2 * step)


@pytest.mark.parametrize("written", ELEMENTWISE, ids=str)
def test_no_point_of_a_grid_beats_the_closed_form(written: Any) -> None:
    operator = proximal_operator.build(written)
    v = torch.linspace(-4, 4, 161, dtype=torch.float64)
    grid = torch.linspace(-4.5, 4.5, 9001, dtype=torch.float64)
    for step in STEPS:
        x = operator.prox(v, step)
        found = objective(operator, x, v, step)
        best = objective(operator, grid[None, :], v[:, None], step).amin(1)
        assert bool((found <= best + 1e-12).all()), (step, float((found - best).max()))


@pytest.mark.parametrize("written", [one for one in ELEMENTWISE if "l2" not in one], ids=str)
def test_small_elements_become_exactly_zero_and_signs_stay(written: Any) -> None:
    operator = proximal_operator.build(written)
    for dtype in (torch.float32, torch.float64):
        v = torch.linspace(-3, 3, 61, dtype=dtype)
        x = operator.prox(v, 1.0)
        assert x.dtype == dtype and bool((x[v.abs() < 0.05] == 0).all())
        assert bool((x * v >= 0).all()) and bool((x.abs() <= v.abs()).all())
        assert torch.equal(operator.prox(-v, 1.0), -x)


@pytest.mark.parametrize("name", ["scad", "mcp", "capped_l1", "l0"])
def test_large_elements_are_not_moved(name: str) -> None:
    operator = proximal_operator.build({name: {"strength": 0.2}})
    v = torch.tensor([-3.0, 2.5])
    assert torch.equal(operator.prox(v, 0.5), v)
    assert not torch.equal(proximal_operator.build({"l1": {"strength": 0.2}}).prox(v, 0.5), v)


@pytest.mark.parametrize("dimension", [0, 1])
def test_group_lasso_is_the_minimizer_of_every_group(dimension: int) -> None:
    """A group's minimizer lies on the line through it, so that its length is searched on a grid."""
    operator = GroupLasso(strength=0.4, dimension=dimension)
    v = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v[2] *= 0.1
    v[:, 3] *= 0.1
    lengths = torch.linspace(0, 1.2, 12001, dtype=torch.float64)
    for step in (0.5, 1.5):
        x = operator.prox(v, step)
        found = operator.penalty(x) + ((x - v).square() / (2 * step)).sum(1 - dimension)
        for group in range(v.shape[dimension]):
            own = v.select(dimension, group)
            far = (own.norm() * (lengths - 1)).square() / (2 * step)
            best = (0.4 * math.sqrt(own.numel()) * own.norm() * lengths + far).min()
            assert found[group] <= best + 1e-12
            direction = x.select(dimension, group) @ own / own.norm()
            assert abs(direction - x.select(dimension, group).norm()) < 1e-12
    assert bool((operator.prox(v, 1.5).select(dimension, 2 if dimension == 0 else 3) == 0).all())


def test_group_lasso_takes_tensors_of_any_shape() -> None:
    operator = GroupLasso(strength=0.3, dimension=1)
    for shape in [(), (4,), (0, 3), (3, 2, 4), (1, 1)]:
        v = torch.randn(shape)
        assert operator.prox(v, 1.0).shape == v.shape
    assert not operator.by_element
    zero = torch.zeros(3, 4)
    assert torch.equal(operator.prox(zero, 1.0), zero)


def test_the_update_is_the_inner_one_and_then_the_operator() -> None:
    written = {"proximal": {"inner": {"sgd": {"lr": 0.1, "momentum": 0.9}}, "operator": {"mcp": {"strength": 0.5}}}}
    rule = optimizer_methods.build(written)
    inner = optimizer_methods.build({"sgd": {"lr": 0.1, "momentum": 0.9}})
    operator = proximal_operator.build({"mcp": {"strength": 0.5}})
    generator = torch.Generator().manual_seed(1)
    params = {"weight": torch.randn(7, 5, generator=generator), "bias": torch.randn(7, generator=generator)}
    plain = {name: p.clone() for name, p in params.items()}
    states = rule.init(params), inner.init(plain)
    for step in range(6):
        grads = {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
        rule.update(params, grads, states[0], lr_scale=0.5, step=step)
        inner.update(plain, grads, states[1], lr_scale=0.5, step=step)
        plain["weight"] = operator.prox(plain["weight"], 0.05)
    assert torch.equal(params["weight"], plain["weight"]) and torch.equal(params["bias"], plain["bias"])


def lasso(operator: Any, lr: float, steps: int = 4000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Least squares of 40 features, of which 4 count: design, response, and weights by proximal gradient."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 40, generator=generator, dtype=torch.float64)
    truth = torch.zeros(40, dtype=torch.float64)
    truth[[3, 11, 17, 29]] = torch.tensor([2.0, -1.5, 1.0, -2.5], dtype=torch.float64)
    y = x @ truth + 0.05 * torch.randn(120, generator=generator, dtype=torch.float64)
    rule = optimizer_methods.build(
        {"proximal": {"inner": {"sgd": {"lr": lr}}, "operator": operator, "parameters": ["^w$"]}}
    )
    params = {"w": torch.zeros(40, dtype=torch.float64)}
    state = rule.init(params)
    for step in range(steps):
        rule.update(params, {"w": x.T @ (x @ params["w"] - y) / 120}, state, lr_scale=1.0, step=step)
    return x, y, params["w"]


def test_with_sgd_it_ends_at_the_minimum_of_loss_and_penalty() -> None:
    """The optimality conditions of L1: the gradient is -strength sign(w) where w is not 0, and within it elsewhere."""
    x, y, w = lasso({"l1": {"strength": 0.1}}, 0.2)
    gradient = x.T @ (x @ w - y) / 120
    kept = w != 0
    assert kept.sum() < 20 and bool(kept[[3, 11, 17, 29]].all())
    torch.testing.assert_close(gradient[kept], -0.1 * w[kept].sign(), rtol=1e-9, atol=1e-9)
    assert bool((gradient[~kept].abs() <= 0.1 + 1e-9).all())


@pytest.mark.parametrize("name", ["mcp", "scad"])
def test_a_nonconvex_penalty_finds_the_features_without_the_bias_of_l1(name: str) -> None:
    truth = torch.tensor([2.0, -1.5, 1.0, -2.5], dtype=torch.float64)
    _, _, by_l1 = lasso({"l1": {"strength": 0.1}}, 0.2)
    _, _, w = lasso({name: {"strength": 0.1}}, 0.2)
    assert torch.nonzero(w).flatten().tolist() == [3, 11, 17, 29]
    assert (w[[3, 11, 17, 29]] - truth).abs().max() < 0.2 * (by_l1[[3, 11, 17, 29]] - truth).abs().max()


def test_zeros_of_half_precision_weights_are_zeros() -> None:
    rule = optimizer_methods.build({"proximal": {"inner": {"sgd": {"lr": 0.1}}, "operator": {"l1": {"strength": 3.0}}}})
    around = Master(inner=rule)
    params = {"w": torch.randn(20, 20, generator=torch.Generator().manual_seed(5)).bfloat16()}
    state = around.init(params)
    for step in range(3):
        around.update(params, {"w": torch.zeros(20, 20)}, state, lr_scale=1.0, step=step)
    assert bool(((params["w"] == 0) == (state["w"]["master"] == 0)).all()) and (params["w"] == 0).float().mean() > 0.3


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"inner": {"by_pattern": {}}}, "by_pattern: {inner: {proximal"),
        ({"inner": "muon"}, "one rate for all parameters"),
        ({"inner": "schedule_free_sgd"}, "an average of sparse points is not sparse"),
        ({"inner": "eva"}, "nor is a step under one clip a rate"),
        ({"operator": {"l1": {"strength": 0}}}, "above 0"),
        ({"operator": {"scad": {"shape": 2}}}, "above 2"),
        ({"operator": {"mcp": {"gamma": -1}}}, "above 0"),
        ({"operator": {"group_lasso": {"dimension": -1}}}, "at least 0"),
        ({"operator": "mpc"}, "mcp"),
        ({"parameters": ["("]}, "regular expression"),
    ],
)
def test_bad_settings_are_named(written: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        optimizer_methods.build({"proximal": written})


def test_a_pattern_that_finds_nothing_is_named() -> None:
    rule = optimizer_methods.build({"proximal": {"parameters": ["heads"]}})
    with pytest.raises(BadInput, match=r"no trained parameter has 'heads' in its name.*head"):
        rule.check(["head.weight", "body.weight"])


@pytest.mark.parametrize(
    ("plan", "operator", "said"),
    [
        ({"sharding": "zero1"}, "group_lasso", "whole: true"),
        ({"sharding": "sdp4bit"}, "l1", "rounds weight updates"),
        ({"sync": "diloco"}, "l1", "plan.sync every_step"),
        ({"sync": "local_sgd"}, "l1", "plan.sync every_step"),
        ({"sync": "just_one_byte"}, "l1", "sgd without momentum"),
        ({"sharding": "zero1"}, "mcp", ""),
        ({"sharding": {"zero1": {"whole": True}}}, "group_lasso", ""),
    ],
)
def test_what_keeps_no_zeros_is_refused(plan: dict[str, Any], operator: str, said: str) -> None:
    train = {"batch": 8, "optimizer": {"proximal": {"operator": operator}}}
    config = RunConfig.model_validate({"plan": plan, "train": train})
    if not said:
        build("data_parallel").plan(Request(config, 2))
        return
    with pytest.raises(BadInput, match=said):
        build("data_parallel").plan(Request(config, 2))
