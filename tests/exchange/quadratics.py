"""Quadratics that differ from rank to rank: where every rank pulls elsewhere, what an exchange loses shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ExchangeContext, ProcessGroups
from gossamer.exchange import Exchange


@dataclass(frozen=True)
class Quadratics:
    """f_i(x) = 1/2 sum_j a_ij (x_j - b_ij)^2; the gradient of rank i at the common optimum is as large as b is."""

    a: Tensor  # (ranks, numel)
    b: Tensor

    @staticmethod
    def make(ranks: int = 8, numel: int = 20, *, seed: int = 0) -> Quadratics:
        rng = torch.Generator().manual_seed(seed)
        a = 0.5 + 1.5 * torch.rand(ranks, numel, generator=rng)
        return Quadratics(a, 10 * torch.randn(ranks, numel, generator=rng))

    @property
    def optimum(self) -> Tensor:
        return (self.a * self.b).double().sum(0).div(self.a.double().sum(0)).float()


@dataclass(frozen=True)
class Descent:
    """Gradient descent from zero in lockstep, every rank with its own noise."""

    steps: int
    lr: Callable[[int], float]
    noise: float = 0.0
    tail: int = 1  # steps at the end whose distance is averaged
    levels: ProcessGroups | None = None

    def distance(self, one: Exchange, on: Quadratics, where: Layout, *, seed: int = 0) -> float:
        """Mean squared distance to the optimum over the last steps."""
        ranks, levels = len(on.a), self.levels or ProcessGroups.flat(len(on.a))
        shares = torch.full((ranks,), 1 / ranks, dtype=torch.float64)
        rng = torch.Generator().manual_seed(seed)
        states, x, total = [one.init(where)] * ranks, torch.zeros(where.numel), 0.0
        for step in range(self.steps):
            lr = self.lr(step)
            grads = on.a * (x - on.b)
            if self.noise:
                grads += self.noise * torch.randn(grads.shape, generator=rng)
            at = [ExchangeContext(r, levels, shares, (seed, step), lr) for r in range(ranks)]
            methods = [one.run(Bucket(where, grads[r].clone()), states[r], at[r]) for r in range(ranks)]
            outcomes = run_lockstep(LocalChannel.world(ranks, levels), methods)
            states = [o.state for o in outcomes]
            x = x - lr * outcomes[0].mean
            total += float((x - on.optimum).square().sum()) if step >= self.steps - self.tail else 0.0
        return total / self.tail
