"""Schedule-free rules against their paper's recurrences in float64, and against the package where it is installed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer import lr_schedule
from gossamer.optimizer.by_pattern import ByPattern
from gossamer.optimizer.master import Master
from gossamer.optimizer.muon import Muon
from gossamer.optimizer.schedule_free_adamw import ScheduleFreeAdamW
from gossamer.optimizer.schedule_free_sgd import ScheduleFreeSGD
from gossamer.spec.errors import BadInput

STEPS, WARMUP = 50, 10
SHAPES = {"matrix": (7, 5), "vector": (5,), "scalar": ()}
Tensors = dict[str, torch.Tensor]
Points = dict[str, np.ndarray]

ADAMW: list[dict[str, Any]] = [
    {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    {"lr": 0.01, "betas": (0.95, 0.999), "r": 1.0},
    {"lr": 0.03, "weight_decay": 0.01, "weight_lr_power": 1.0},
]
SGD: list[dict[str, Any]] = [{"lr": 0.3, "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.98, "r": 0.5}]
CASES = [("schedule_free_adamw", one) for one in ADAMW] + [("schedule_free_sgd", one) for one in SGD]


def begin(dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def gradient(step: int, at: torch.Tensor) -> torch.Tensor:
    """Of a bowl, with noise: it depends on the point, so that one at the wrong point would be seen."""
    noise = torch.randn(at.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (at.double() + 0.5 * noise).to(at.dtype)


def warm(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP)


def ours(name: str, given: dict[str, Any], dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Return the trained and the averaged point."""
    rule = optimizer_methods.build({name: {**given, "decay_1d": True}})
    params = begin(dtype)
    state = rule.init(params)
    for step in range(STEPS):
        grads = {n: gradient(step, p) for n, p in params.items()}
        rule.update(params, grads, state, lr_scale=warm(step), step=step)
    return params, dict(rule.average(params, state))


def reference(name: str, given: dict[str, Any]) -> tuple[Points, Points]:
    """Three points as in the paper: gradients at y, steps of z, x their average."""
    is_adamw = name == "schedule_free_adamw"
    default = ScheduleFreeAdamW() if is_adamw else ScheduleFreeSGD()
    r, power = given.get("r", 0.0), given.get("weight_lr_power", 2.0)
    b = given.get("betas", (0.9, 0.999))[0] if is_adamw else given.get("momentum", 0.9)
    b2 = given.get("betas", (0.9, 0.999))[1]
    found: tuple[Points, Points] = ({}, {})
    for n, start in begin(torch.float64).items():
        x = z = start.numpy().copy()
        v, total = np.zeros_like(x), 0.0
        for t in range(1, STEPS + 1):
            rate = given.get("lr", default.lr) * warm(t - 1)
            y = (1 - b) * z + b * x
            g = gradient(t - 1, torch.as_tensor(y)).numpy()
            v = b2 * v + (1 - b2) * g**2
            d = g / (np.sqrt(v / (1 - b2**t)) + 1e-8) if is_adamw else g
            z = z - rate * (d + given.get("weight_decay", 0.0) * y)
            weight = t**r * rate**power
            total += weight
            x = x + weight / total * (z - x)
        found[0][n], found[1][n] = (1 - b) * z + b * x, x
    return found


@pytest.mark.parametrize(("name", "given"), CASES)
def test_both_points_are_those_of_the_paper(name: str, given: dict[str, Any]) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        for mine, wanted in zip(ours(name, given, dtype), reference(name, given), strict=True):
            assert all(np.abs(mine[n].numpy() - wanted[n]).max() < limit for n in SHAPES)
    assert any(np.abs(a[n] - b[n]).max() > 0.001 for a, b in [reference(name, given)] for n in SHAPES)


@pytest.mark.parametrize(("name", "given"), CASES)
def test_it_is_the_package(name: str, given: dict[str, Any]) -> None:
    package = pytest.importorskip("schedulefree")
    made = package.AdamWScheduleFree if name == "schedule_free_adamw" else package.SGDScheduleFree
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        params = {n: torch.nn.Parameter(p) for n, p in begin(dtype).items()}
        other = made(list(params.values()), warmup_steps=WARMUP, **given)
        other.train()
        for step in range(STEPS):
            for p in params.values():
                p.grad = gradient(step, p.detach())
            other.step()
        trained, average = ours(name, given, dtype)
        assert all(torch.allclose(trained[n], p.detach(), rtol=limit, atol=limit) for n, p in params.items())
        other.eval()
        assert all(torch.allclose(average[n], p.detach(), rtol=limit, atol=limit) for n, p in params.items())


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd"])
def test_wrappers_hand_the_average_on(name: str) -> None:
    """Of float32 copies where parameters are halves, and with a rate of its own by name."""
    rule = optimizer_methods.build(name)
    around = Master(inner=ByPattern(inner=rule, lr_factors=(("matrix", 0.5),)))
    halves = {n: p.bfloat16() for n, p in begin(torch.float32).items()}
    wide = {n: p.float() for n, p in halves.items()}
    state, plain = around.init(halves), rule.init(wide)
    for step in range(3):
        grads = {n: gradient(step, p) for n, p in wide.items()}
        around.update(halves, grads, state, lr_scale=1.0, step=step)
        for n in wide:
            scale = 0.5 if n == "matrix" else 1.0
            rule.update({n: wide[n]}, {n: grads[n]}, plain, lr_scale=scale, step=step)
    assert around.has_average and not optimizer_methods.build("adamw").has_average
    for n, one in around.average(halves, state).items():
        assert one.dtype == torch.bfloat16 and torch.equal(one, rule.average(wide, plain)[n].bfloat16())


def test_rows_have_the_average_of_the_whole() -> None:
    rule = ScheduleFreeAdamW()
    whole, rows = begin(torch.float32), begin(torch.float32)["matrix"][2:5].clone()
    state, part = rule.init(whole), rule.init({"matrix": rows})
    for step in range(4):
        grads = {n: gradient(step, p) for n, p in whole.items()}
        rule.update(whole, grads, state, lr_scale=1.0, step=step)
        rule.update({"matrix": rows}, {"matrix": grads["matrix"][2:5]}, part, lr_scale=1.0, step=step)
    assert torch.equal(rule.average({"matrix": rows}, part)["matrix"], rule.average(whole, state)["matrix"][2:5])


def test_settings_out_of_their_limits() -> None:
    with pytest.raises(BadInput, match="wanted an interpolation above 0, as the averaged point is computed from"):
        ScheduleFreeAdamW(betas=(0.0, 0.9))
    with pytest.raises(BadInput, match=r"wanted a number from 0 to below 1.*got 1"):
        ScheduleFreeSGD(momentum=1.0)
    with pytest.raises(BadInput, match="wanted an optimizer that is evaluated at its parameters"):
        Muon(rest=ScheduleFreeAdamW())


def test_schedules_say_whether_they_fall() -> None:
    for written in ("constant", {"constant": {"warmup": 3}}, {"warmup_stable_decay": {"decay": 0}}, "cosine"):
        one = lr_schedule.build(written)
        factors = [one.factor(step, 40) for step in range(40)]
        assert one.never_falls == all(a <= b for a, b in pairwise(factors))
    assert not lr_schedule.build("warmup_stable_decay").never_falls
