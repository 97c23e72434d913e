"""What the references train: the model of run.jobs, its samples in the order of the run, its gradients in float64.

All that is trained is one vector of float64, laid out as a bucket is: the last parameter first. With the product the
references share the order of the samples and random numbers, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from gossamer.data.ordering import order
from run.jobs import Small, Tokens

Vector = NDArray[np.float64]

WARMUP = 3  # steps in which the rate rises: it changes in every step, also inside of a round


@cache
def model() -> Small:
    torch.manual_seed(0)
    return Small(0.0).double()


@dataclass(frozen=True)
class Task:
    """`rows` of every rank in a step, `lr` the largest rate, `clip` as in train.max_grad_norm; `frozen`: what stays."""

    rows: tuple[int, ...]
    lr: float
    steps: int = 12
    clip: float = 0.5
    frozen: tuple[str, ...] = ()
    data: Tokens = field(default_factory=Tokens)

    def names(self) -> list[str]:
        """What is trained, as it lies in a bucket."""
        named = [n for n, _ in model().named_parameters()]
        return [n for n in reversed(named) if not n.startswith(self.frozen)] if self.frozen else named[::-1]

    def start(self) -> Vector:
        params = dict(model().named_parameters())
        return np.concatenate([params[n].detach().numpy().ravel() for n in self.names()])

    def spans(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Where every parameter lies, and its shape."""
        params, at, found = dict(model().named_parameters()), 0, {}
        for name in self.names():
            shape = tuple(params[name].shape)
            found[name] = (slice(at, at + math.prod(shape)), shape)
            at += math.prod(shape)
        return found

    def is_matrix(self) -> NDArray[np.bool_]:
        """By number, whether its parameter has two dimensions: norms and biases neither decay nor have a ratio."""
        return np.concatenate([np.full(math.prod(s), len(s) >= 2) for _, s in self.spans().values()])

    def places(self, *prefixes: str) -> NDArray[np.int64]:
        """Those of the numbers of some modules."""
        held = [np.arange(at.start, at.stop) for n, (at, _) in self.spans().items() if n.startswith(prefixes)]
        return np.concatenate(held)

    def rate(self, step: int) -> float:
        """lr times half a cosine that begins after the warm-up."""
        return self.lr * self.factor(step)

    def factor(self, step: int) -> float:
        if step < WARMUP:
            return (step + 1) / (WARMUP + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - WARMUP) / (self.steps - WARMUP))

    def gradient(self, x: Vector, step: int, ranks: Sequence[int]) -> tuple[Vector, float]:
        """Of the mean loss over the valid labels of these ranks' rows, and how many labels these are."""
        params = {n: torch.tensor(x[at].reshape(s), requires_grad=True) for n, (at, s) in self.spans().items()}
        mean, labels = self._loss(params, step, ranks)
        mean.backward()
        return np.concatenate([params[n].grad.numpy().ravel() for n in params]), labels  # type: ignore[union-attr]

    def loss(self, x: Vector, step: int, rank: int) -> tuple[float, float]:
        """The mean loss of a rank's rows, and their valid labels."""
        mean, labels = self._loss(
            {n: torch.tensor(x[at].reshape(s)) for n, (at, s) in self.spans().items()}, step, [rank]
        )
        return float(mean), labels

    def _loss(self, params: dict[str, Tensor], step: int, ranks: Sequence[int]) -> tuple[Tensor, float]:
        first, all_rows = step * sum(self.rows), []
        for rank in ranks:
            begin = first + sum(self.rows[:rank])
            all_rows += range(begin, begin + self.rows[rank])
        chosen = torch.from_numpy(order(0, len(self.data))(np.array(all_rows)))
        ids, labels = self.data.ids[chosen], self.data.labels[chosen]
        fixed = {n: p.detach() for n, p in model().named_parameters() if n not in params}
        scale = torch.ones(len(ids), dtype=torch.float64)
        logits = functional_call(model(), {**params, **fixed}, (ids, scale))[:, :-1]
        counts = (labels[:, 1:] != -100).sum().item()
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        return total / max(1, counts), float(counts)

    def clipped(self, g: Vector) -> Vector:
        """At most `clip` long; 0: as it is."""
        length = float(np.linalg.norm(g))
        return g * (self.clip / (length + 1e-6)) if self.clip and length > self.clip else g
