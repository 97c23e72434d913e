"""Interval arithmetic of tensors: every operation returns an interval that holds all results of what its inputs hold.

An interval is (center, radius >= 0), elementwise. Equations:
    W x + b of an interval x:           center W c + b ;  radius |W| r
    W x + b of intervals W, x, b:       center W_c x_c + b_c ;  radius |W_c| x_r + W_r |x_c| + W_r x_r + b_r
    relu:                               relu of both ends
Bounds are up to rounding: ends are 1e-6 of the largest term wrong in float32.
Source: interval bound propagation (Gowal et al. 2018, arXiv:1810.12715).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Interval:
    """All tensors within `radius` (>= 0) of `center`, element by element."""

    center: Tensor
    radius: Tensor

    @property
    def lower(self) -> Tensor:
        return self.center - self.radius

    @property
    def upper(self) -> Tensor:
        return self.center + self.radius

    @staticmethod
    def of_ends(lower: Tensor, upper: Tensor) -> Interval:
        return Interval((lower + upper) / 2, (upper - lower) / 2)

    def holds(self, x: Tensor, slack: float = 0.0) -> Tensor:
        """Return elementwise whether x is inside, or outside by at most `slack`."""
        return (x - self.center).abs() <= self.radius + slack


def linear(x: Interval, weight: Tensor, bias: Tensor | None = None) -> Interval:
    """Return weight x + bias of an interval x (..., in); weight (out, in)."""
    center = x.center @ weight.t()
    return Interval(center if bias is None else center + bias, x.radius @ weight.abs().t())


def linear_of_intervals(x: Interval, weight: Interval, bias: Interval) -> Interval:
    """Return weight x + bias where all three are intervals: (..., out)."""
    center = x.center @ weight.center.t() + bias.center
    radius = x.radius @ weight.center.abs().t() + (x.center.abs() + x.radius) @ weight.radius.t() + bias.radius
    return Interval(center, radius)


def relu(x: Interval) -> Interval:
    """Return relu of an interval."""
    return Interval.of_ends(torch.relu(x.lower), torch.relu(x.upper))


def worst_logits(logits: Interval, labels: Tensor) -> Tensor:
    """Return the logits in the interval at which the label fares worst: its own lowest, all others' highest."""
    is_label = torch.nn.functional.one_hot(labels, logits.center.shape[-1]).bool()
    return torch.where(is_label, logits.lower, logits.upper)


def intersection(intervals: Sequence[Interval]) -> Interval | None:
    """Return what all intervals hold; None if there is an element in which they have nothing in common."""
    lower = torch.stack([one.lower for one in intervals]).amax(0)
    upper = torch.stack([one.upper for one in intervals]).amin(0)
    return Interval.of_ends(lower, upper) if bool((lower <= upper).all()) else None
