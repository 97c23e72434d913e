"""The aggregation of tapped hidden states that side networks share.

Equations, of hidden states h_1 ... h_N (the last one is the output feature h_out):
    z_i = D_i ReLU(h_i) ;  z_out = at(z_N)
    w_it = l1(ReLU(<z_out, a_i * z_it>) allowed_t) over tokens t ;  f_i = sum_t w_it z_it + at(z_i)      (i < N)
    c_i = l1(ReLU(<b, f_i * z_out>) / R_i) over taps i ;  g = sum_i c_i f_i + z_out
    correction = U ReLU(g)
    R_i = sum_j ReLU(cos(f_i, f_j)) >= 1 where redundancy counts, else 1
Symbols: D_i (k, d_i), U (d_N, k) and their biases, a_i, b (k,) trained; at() takes the token that stands for the
sequence (`_tokens`); l1(x) = x / (sum x + 1e-6), so that a row of zeros stays one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.model.side._tokens import TokenView

EPS = 1e-6


class Aggregation(nn.Module):
    """The trained part of a side network.

    widths: of the taps; width: k. guided: whether every tap has a vector a_i; redundancy: whether R_i counts.
    """

    def __init__(self, widths: Sequence[int], width: int, *, guided: bool, redundancy: bool) -> None:
        super().__init__()
        self.redundancy = redundancy
        self.down = nn.ModuleList(nn.Linear(one, width) for one in widths)
        self.guides = nn.Parameter(torch.ones(len(widths) - 1, width)) if guided else None
        self.confidence = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, widths[-1])

    @staticmethod
    def draw(name: str, tensor: Tensor) -> None:
        """Set a tensor to its initial values: D_i uniform in +-1 / sqrt(d_i), a_i and b 1, all else 0."""
        if name.endswith(("guides", "confidence")):
            nn.init.ones_(tensor)
        elif ".down." in f".{name}" and name.endswith("weight"):
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))
        else:
            nn.init.zeros_(tensor)

    def reduced(self, tap: int, hidden: Tensor) -> Tensor:
        """Return z of a tap's hidden state (rows, tokens, d): (rows, tokens, k)."""
        z: Tensor = self.down[tap](torch.relu(hidden))
        return z

    def forward(self, taps: Sequence[Tensor], view: TokenView) -> Tensor:
        """Return the correction of the last tap: (rows, tokens, d) if causal, else (rows, 1, d)."""
        out = view.feature(taps[-1])
        guides: Sequence[Tensor | None] = [None] * (len(taps) - 1) if self.guides is None else [*self.guides]
        features = torch.stack([_feature(z, out, a, view) for z, a in zip(taps[:-1], guides, strict=True)])
        score = torch.relu((features * out * self.confidence).sum(-1))  # (taps, rows, queries)
        if self.redundancy:
            score = score / redundancy(features)
        weights = l1_normalized(score, dim=0)
        correction: Tensor = self.up(torch.relu((weights[..., None] * features).sum(0) + out))
        return correction


def _feature(z: Tensor, out: Tensor, guide: Tensor | None, view: TokenView) -> Tensor:
    """Return f of a tap. Scores are computed again in backward: they are (tokens, tokens) per row, and z is narrow."""
    if not torch.is_grad_enabled():
        return interaction(z, out, guide, view)
    found: Tensor = checkpoint(interaction, z, out, guide, view, use_reentrant=False, preserve_rng_state=False)
    return found


def interaction(z: Tensor, out: Tensor, guide: Tensor | None, view: TokenView) -> Tensor:
    """Return f = sum_t w_t z_t + at(z) of one tap: (rows, queries, k)."""
    keys = z if guide is None else z * guide
    score = torch.relu(out @ keys.transpose(1, 2))  # (rows, queries, tokens)
    if view.allowed is not None:
        score = score.masked_fill(~view.allowed, 0.0)
    return l1_normalized(score, dim=-1) @ z + view.feature(z)


def l1_normalized(x: Tensor, *, dim: int) -> Tensor:
    """Return x >= 0 divided by its sum along `dim`; where all are 0 they stay 0."""
    return (x / (x.sum(dim, keepdim=True, dtype=torch.float32) + EPS)).to(x.dtype)


def redundancy(features: Tensor) -> Tensor:
    """Return R (taps, ...) of features (taps, ..., k): how many taps say the same, 1 for one that no other repeats.

    The cosine of a tap with itself is written as 1, also where its feature is 0.
    """
    unit = F.normalize(features.float(), dim=-1)
    likeness = torch.relu(torch.einsum("i...k,j...k->ij...", unit, unit))
    itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
    itself = itself.view(len(features), len(features), *[1] * (features.ndim - 2))
    return likeness.masked_fill(itself, 1.0).sum(1).to(features.dtype)
