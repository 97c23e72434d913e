"""Intervals hold what they must: points of the inputs give points of the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.ops.intervals import Interval, intersection, linear, linear_of_intervals, relu, worst_logits


def some(*shape: int) -> Interval:
    return Interval(torch.randn(*shape, dtype=torch.float64), torch.rand(*shape, dtype=torch.float64))


def points(of: Interval, count: int) -> Tensor:
    inner = of.center + of.radius * (2 * torch.rand(count, *of.center.shape, dtype=torch.float64) - 1)
    ends = of.center + of.radius * torch.randn(count, *of.center.shape, dtype=torch.float64).sign()
    return torch.cat([inner, ends])


def test_outputs_of_points_are_inside() -> None:
    torch.manual_seed(0)
    x, weight, bias = some(3, 5), some(4, 5), some(4)
    found = relu(linear_of_intervals(x, weight, bias))
    for a, w, b in zip(points(x, 500), points(weight, 500), points(bias, 500), strict=True):
        assert bool(found.holds(torch.relu(a @ w.t() + b), 1e-12).all())
    exact = linear(x, weight.center, bias.center)
    for a in points(x, 100):
        assert bool(exact.holds(a @ weight.center.t() + bias.center, 1e-12).all())


def test_a_linear_layer_is_tight() -> None:
    """Of one linear layer both ends are reached, by the ends of x with the signs of the weights."""
    torch.manual_seed(0)
    x, weight = some(5), torch.randn(4, 5, dtype=torch.float64)
    best = torch.stack([weight[o] @ (x.center + x.radius * weight[o].sign()) for o in range(4)])
    assert torch.allclose(linear(x, weight).upper, best)


def test_radius_0_is_the_point() -> None:
    torch.manual_seed(0)
    x, weight, bias = (Interval(one.center, torch.zeros_like(one.center)) for one in (some(3, 5), some(4, 5), some(4)))
    found = relu(linear_of_intervals(x, weight, bias))
    assert torch.allclose(found.center, torch.relu(x.center @ weight.center.t() + bias.center))
    assert bool((found.radius == 0).all())


def test_worst_logits_and_intersections() -> None:
    logits = Interval(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.25, 0.125]]))
    assert worst_logits(logits, torch.tensor([1])).tolist() == [[1.5, 1.75, 3.125]]
    a, b = (
        Interval.of_ends(torch.tensor([0.0, 0.0]), torch.tensor([2.0, 2.0])),
        Interval.of_ends(torch.tensor([1.0, -1.0]), torch.tensor([3.0, 1.0])),
    )
    both = intersection([a, b])
    assert both is not None and both.lower.tolist() == [1, 0] and both.upper.tolist() == [2, 1]
    assert intersection([a, Interval.of_ends(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 1.0]))]) is None
