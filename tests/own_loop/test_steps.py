"""What ranks compare before a step: that it shows what it should."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.own_loop.optimizer_step import _differ, _leaning
from gossamer.own_loop.startup import check_optimizers
from gossamer.own_loop.untrained_tensors import UntrainedTensors
from gossamer.spec.errors import BadInput, StepRejected
from pool import Pool


def test_buffers_of_one_length_that_point_elsewhere_differ() -> None:
    draw = torch.Generator().manual_seed(0)
    queue = F.normalize(torch.randn(500, 64, generator=draw), dim=1)
    other = queue.clone()
    other[:2] = F.normalize(torch.randn(2, 64, generator=draw), dim=1)
    for one, two in ((queue, other), (torch.tensor([3]), torch.tensor([4])), (torch.ones(()), torch.ones(()) * 1.01)):
        assert _differ(torch.tensor([_leaning([one]), _leaning([two])]), 1e-6)
        assert not _differ(torch.tensor([_leaning([one]), _leaning([one.clone()])]), 1e-6)
    assert not _differ(torch.tensor([_leaning([queue]), _leaning([queue * (1 + 1e-7)])]), 1e-6)
    assert _leaning([]) == 0.0 == _leaning([torch.zeros(3)])


class Around(torch.optim.Optimizer):
    """As several are found: without a call of Optimizer's constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state: Any = defaultdict(dict)


def test_an_optimizer_that_was_not_constructed_as_one_is_refused() -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(BadInput, match=r"Around, which does not.*the optimizer inside Around to gossamer\.wrap"):
        check_optimizers([Around(inner)])
    check_optimizers([inner])


def test_frozen_parameters_are_among_what_ranks_compare() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    model.register_buffer("queue", torch.zeros(2))
    assert set(UntrainedTensors([model]).by_name()) == {"queue", "2.weight", "2.bias"}


def test_what_is_compared_is_what_a_model_has_now() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model in models:
        model.register_buffer("center", torch.zeros(2))
        model.register_buffer("cached", torch.zeros(2), persistent=False)
    untrained = UntrainedTensors(models)
    for model in models:
        model.center, model.cached = torch.ones(2), torch.ones(2)
    models[1].weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    found = untrained.by_name()
    names = {f"model {index} {name}" for index in range(2) for name in ("center", "cached")} | {"model 1 weight"}
    assert set(found) == names and all(bool(one.all()) for one in found.values())
    models[0].cached = torch.ones(3)  # a cache, that a rank whose rows are longer has made longer
    models[1].register_buffer("later", torch.ones(3), persistent=False)
    assert set(untrained.by_name()) == names - {"model 0 cached"}


def test_the_last_pass_of_a_group_may_be_that_of_a_closure_and_a_released_model_is_alone(pool: Pool) -> None:
    torch.manual_seed(1)
    net = nn.Linear(3, 2)
    data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(8)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for group in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for x, y in group:
            (F.mse_loss(net(x), y) / 2).backward()
        optimizer.step()
    alone = nn.Linear(3, 2)
    alone.load_state_dict(net.state_dict())
    (F.mse_loss(alone(data[0][0]), data[0][1]) / 2).backward()
    found = pool.run("own_loop.closure_jobs:trained", 2)
    for one in found:
        torch.testing.assert_close(torch.tensor(one["weights"]), net.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(found[0]["alone"]), alone.weight.grad, rtol=1e-5, atol=1e-6)


def test_a_closure_without_the_last_pass_of_a_group_is_refused(pool: Pool) -> None:
    for said in pool.run("own_loop.closure_jobs:left_open", 2):
        assert "before the accumulated gradients were averaged" in said


def weight_of(value: float) -> nn.Linear:
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def closure_of(net: nn.Module, optimizer: torch.optim.Optimizer, *factors: float) -> Callable[[], Tensor]:
    """A closure whose loss has the next of the factors at each evaluation, and then the last."""
    left = list(factors)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (left.pop(0) if len(left) > 1 else left[0]) * (net(torch.ones(4, 1)) - 1).square().mean()
        loss.backward()
        return loss

    return closure


def test_a_step_with_a_closure_is_clipped_and_rejected_as_one_without(pool: Pool) -> None:
    without = pool.run("own_loop.closure_jobs:clipped", 2, closes=False)
    found = pool.run("own_loop.closure_jobs:clipped", 2, closes=True)
    assert [one["weights"] for one in found] == [one["weights"] for one in without]
    assert [one["rejected"] for one in (*found, *without)] == [1] * 4
    assert found[0]["losses"] == found[1]["losses"] and all(map(math.isfinite, found[0]["losses"]))


def test_a_closure_in_one_process_is_clipped_and_rejected() -> None:
    net = weight_of(0.0)
    optimizer: Any = torch.optim.SGD(net.parameters(), 1.0)
    net, optimizer, _ = gossamer.wrap(net, optimizer, max_grad_norm=0.5)
    optimizer.step(closure_of(net, optimizer, 100.0))
    assert net.weight.item() == pytest.approx(0.5)
    optimizer.step(closure=closure_of(net, optimizer, math.nan))
    assert net.weight.item() == pytest.approx(0.5) and optimizer.rejected == 1
    assert math.isnan(net.weight.grad.item())  # given back


def test_lbfgs_is_rejected_before_it_has_moved_and_refused_afterwards() -> None:
    net = weight_of(0.0)
    optimizer: Any = torch.optim.LBFGS(net.parameters(), lr=0.1)
    net, optimizer, _ = gossamer.wrap(net, optimizer)
    optimizer.step(closure_of(net, optimizer, math.inf))
    assert net.weight.item() == 0.0 and optimizer.rejected == 1
    optimizer.step(closure_of(net, optimizer, 1.0))
    assert net.weight.item() == pytest.approx(1.0, abs=0.2) and optimizer.rejected == 1
    with pytest.raises(StepRejected, match=r"step\(closure\) 3: wanted finite .*not finite, in evaluation 2"):
        net.weight.data.zero_()
        optimizer.step(closure_of(net, optimizer, 1.0, math.nan))


class Ahead(torch.optim.SGD):
    """One that evaluates its closure elsewhere than where it is, or twice."""

    def __init__(self, params: Any, *, moves: bool) -> None:
        super().__init__(params, 0.1)
        self.moves = moves

    def step(self, closure: Any = None) -> Any:
        if self.moves:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
        with torch.enable_grad():
            closure()
            return closure()


@pytest.mark.parametrize(("moves", "said"), [(True, "in evaluation 1: "), (False, "got an evaluation after one")])
def test_an_optimizer_that_cannot_be_stopped_is_refused_a_gradient_that_is_not_finite(moves: bool, said: str) -> None:
    net = weight_of(0.0)
    optimizer: Any = Ahead(net.parameters(), moves=moves)
    net, optimizer, _ = gossamer.wrap(net, optimizer)
    with pytest.raises(StepRejected, match=said):
        optimizer.step(closure_of(net, optimizer, math.nan))
    assert net.weight.grad is not None


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_that_is_clipped_has_no_loss_scale(fused: bool, unscales: bool) -> None:
    net = weight_of(0.0)
    optimizer: Any = torch.optim.SGD(net.parameters(), 1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    net, optimizer, _ = gossamer.wrap(net, optimizer, max_grad_norm=0.5, scaler=scaler)
    scaler.scale((10 * net(torch.ones(4, 1))).mean()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert net.weight.item() == pytest.approx(-0.5, rel=1e-5)


def test_an_optimizer_that_is_wrapped_again_is_clipped_as_the_last_wrap_says() -> None:
    net = weight_of(0.0)
    optimizer: Any = torch.optim.SGD(net.parameters(), 1.0)
    for norm, moved in ((0.5, 0.5), (2.0, 2.0), (0.0, 100.0)):
        net, optimizer, _ = gossamer.wrap(net, optimizer, max_grad_norm=norm)
        nn.init.zeros_(net.weight)
        optimizer.zero_grad()
        (-100 * net(torch.ones(4, 1))).mean().backward()
        optimizer.step()
        assert net.weight.item() == pytest.approx(moved, rel=1e-5)


def test_a_step_that_takes_the_scaler_itself_is_not_clipped_but_refused() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            raise AssertionError

    net = weight_of(0.0)
    net, optimizer, _ = gossamer.wrap(net, Own(net.parameters(), 1.0), max_grad_norm=0.5)
    net(torch.ones(4, 1)).mean().backward()
    with pytest.raises(BadInput, match=r"max_grad_norm: .*scaler\.unscale_"):
        optimizer.step(grad_scaler=torch.amp.GradScaler("cpu"))
