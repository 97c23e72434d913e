"""The bound of mutual information on correlated Gaussians, whose mutual information is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.ops.mutual_information import interpolated_bound

K, DIMS = 64, 20


def scores(rho: float, seed: int) -> Tensor:
    """Return the best critic, log p(y | x) - log p(y), of K pairs of DIMS Gaussians with correlation `rho`."""
    x, noise = torch.randn(2, K, DIMS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = rho * x + math.sqrt(1 - rho**2) * noise
    gap = y[None] - rho * x[:, None]
    log_conditional = -(gap.square() / (1 - rho**2)).sum(-1) / 2 - DIMS / 2 * math.log(1 - rho**2)
    return log_conditional + y.square().sum(-1)[None] / 2


def information(rho: float) -> float:
    return -DIMS / 2 * math.log(1 - rho**2)


def mean_bound(rho: float, alpha: float, draws: int = 200) -> float:
    return sum(float(interpolated_bound(scores(rho, seed), alpha)) for seed in range(draws)) / draws


def test_the_estimate_is_below_and_close_where_little_is_to_know() -> None:
    true = information(0.3)
    assert true < 1
    for alpha in (0.5, 0.9, 1.0):
        assert 0.8 * true < mean_bound(0.3, alpha) < true + 0.02


def test_info_nce_stops_at_log_k_and_the_others_do_not() -> None:
    true = information(0.8)
    assert true > 2 * math.log(K)
    each = [float(interpolated_bound(scores(0.8, seed), 1.0)) for seed in range(50)]
    assert max(each) <= math.log(K) and sum(each) / 50 > 0.98 * math.log(K)
    assert math.log(K) + 1 < mean_bound(0.8, 0.01, 50) < true


def test_a_constant_on_the_critic_changes_info_nce_alone_in_nothing() -> None:
    f = scores(0.5, 0)
    assert float(interpolated_bound(f + 7, 1.0)) == pytest.approx(float(interpolated_bound(f, 1.0)), rel=1e-12)
    assert float(interpolated_bound(f + 7, 0.5)) != pytest.approx(float(interpolated_bound(f, 0.5)), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_it_is_the_equation(alpha: float) -> None:
    f = scores(0.2, 1)[:5, :5]
    log_q, wanted = 0.3, 1.0
    for j in range(5):
        others = [k for k in range(5) if k != j]
        r = alpha * sum(math.exp(float(f[k, j])) for k in range(5)) / 5 + (1 - alpha) * math.exp(log_q)
        apart = alpha * sum(math.exp(float(f[k, j])) for k in others) / 4 + (1 - alpha) * math.exp(log_q)
        wanted += (float(f[j, j]) - math.log(r)) / 5
        wanted -= sum(math.exp(float(f[k, j])) for k in others) / 4 / apart / 5
    assert float(interpolated_bound(f, alpha, log_q)) == pytest.approx(wanted, rel=1e-10)


def test_large_scores_have_finite_gradients() -> None:
    f = (1000 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).requires_grad_()
    interpolated_bound(f, 1.0).backward()
    assert f.grad is not None and bool(f.grad.isfinite().all())
