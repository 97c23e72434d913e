"""Norms over many tensors, against float64."""

from __future__ import annotations

import pytest
import torch

from gossamer.ops.norm import global_norm_squared, scale_


def some(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in [(300, 70), (9,), (), (0, 4), (5, 1, 2)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_float64(dtype: torch.dtype) -> None:
    tensors = some(dtype)
    exact = sum(t.double().square().sum() for t in tensors)
    got = global_norm_squared(tensors)
    assert got.dtype == torch.float32 and got.shape == ()
    assert abs(got.item() / float(exact) - 1) < 5e-6


def test_half_types_do_not_overflow() -> None:
    assert global_norm_squared([torch.full((4,), 1e4, dtype=torch.float16)]).item() == pytest.approx(4e8, rel=1e-3)


def test_a_large_tensor_loses_nothing() -> None:
    x = torch.full((5_000_003,), 0.1)
    assert global_norm_squared([x]).item() == pytest.approx(x.numel() * x[0].item() ** 2, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    assert not global_norm_squared([torch.ones(3), torch.tensor([1.0, bad])]).isfinite()


def test_nothing_is_zero() -> None:
    assert global_norm_squared([]).item() == 0.0
    scale_([], 3.0)


def test_scale_in_place_by_number_and_tensor() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.ones(4, requires_grad=True)
    whole = torch.zeros(4, 4)
    whole[:, 1] = 2.0
    scale_([a, b, whole[:, 1]], 0.5)
    scale_([a, b, whole[:, 1]], torch.tensor(4.0))
    assert a.equal(torch.arange(6.0).view(2, 3) * 2) and b.equal(torch.full((4,), 2.0))
    assert whole.sum() == 16.0
