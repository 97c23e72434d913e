"""A lower bound of the mutual information of pairs, between low variance and low bias.

    I_a = 1 + E_joint[f(x_1, y) - log r] - E_apart[exp f(x_1, y) / r],    r = a mean_k exp f(x_k, y) + (1 - a) q
Symbols: pairs (x_i, y_i), i = 1..K; f a critic; a from 0 to 1; log q a baseline, a number or one by y. a = 1 is
InfoNCE: at most log K, and unchanged by a constant added to f. a = 0 has no such limit, and more variance.
B. Poole et al., On Variational Bounds of Mutual Information, ICML 2019, https://arxiv.org/abs/1905.06922, I_alpha.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def interpolated_bound(scores: Tensor, alpha: float, log_q: Tensor | float = 0.0) -> Tensor:
    """Return I_a, (), with a graph, of scores f(x_i, y_j) (K, K) with K >= 2, of which the diagonal are the pairs."""
    count = scores.shape[0]
    base = torch.as_tensor(log_q, dtype=scores.dtype, device=scores.device).expand(count)
    pairs = torch.eye(count, dtype=torch.bool, device=scores.device)
    apart = scores.masked_fill(pairs, -torch.inf)
    log_r = _mixed(scores.logsumexp(0) - math.log(count), base, alpha)
    log_r_apart = _mixed(apart.logsumexp(0) - math.log(count - 1), base, alpha)
    joint = (scores.diagonal() - log_r).mean()
    marginal = (apart.logsumexp(0) - math.log(count - 1) - log_r_apart).exp().mean()
    return 1 + joint - marginal


def _mixed(log_mean: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """Return log(a exp log_mean + (1 - a) exp log_q)."""
    if alpha in (0.0, 1.0):
        return log_mean if alpha else log_q
    return torch.logaddexp(log_mean + math.log(alpha), log_q + math.log1p(-alpha))
