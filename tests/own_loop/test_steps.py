"""What ranks compare before a step: that it shows what it should."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gossamer.own_loop import _buffers
from gossamer.own_loop.optimizer_step import _differ, _leaning
from gossamer.own_loop.startup import check_optimizers
from gossamer.spec.errors import BadInput
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
    assert set(_buffers([model])) == {"queue", "2.weight", "2.bias"}


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
