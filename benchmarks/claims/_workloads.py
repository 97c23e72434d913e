"""Workloads of a few seconds on one core for times to a target, all on the bytes of the standard library.

lm           a decoder: the next byte
mlp          the next byte from the sixteen before it
conv         causal convolutions: the next byte
autoencoder  the histogram of 64 bytes through 16 numbers, as squared error of its normalized entries
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from claims._lm import Lm, Shape, loss_of, text
from gossamer import optimizer as optimizer_methods
from gossamer.model.layer_vectors import LayerHooks
from gossamer.optimizer import LayerVectors

_CHECKED = 1024  # validation sequences


@dataclass(frozen=True, slots=True)
class Workload:
    """`length`: bytes of a sequence, with the one to be told; `steps`: of the longest trial."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    length: int
    rows: int
    steps: int


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.first, self.second, self.head = nn.Linear(16 * 24, 256), nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(self.embed(rows).flatten(1))))))


class Conv(nn.Module):
    """Convolutions over the bytes before, as matrices of the bytes side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 48)
        self.layers = nn.ModuleList(nn.Linear(4 * 48, 48) for _ in range(3))
        self.head = nn.Linear(48, 256)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows)
        for number, layer in enumerate(self.layers):
            gap = 4**number if number < 2 else 8
            beside = [pad(x, (0, 0, k * gap, 0))[:, : x.shape[1]] for k in range(4)]
            x = x + torch.relu(layer(torch.cat(beside, -1)))
        return self.head(x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (128, 256, 64, 16, 64, 256, 128)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if number in (2, len(self.layers) - 1) else torch.tanh(layer(x))
        return x


def histogram(rows: Tensor) -> Tensor:
    """Counts of the ASCII characters, each brought to about one."""
    counts = torch.zeros(len(rows), 128).scatter_add_(1, rows.clamp(max=127), torch.ones(rows.shape))
    return (counts.sqrt() - _moments()[0]) / _moments()[1]


@cache
def _moments() -> tuple[Tensor, Tensor]:
    train, _ = text()
    rows = train[: 64 * 8192].view(-1, 64).clamp(max=127)
    roots = torch.zeros(len(rows), 128).scatter_add_(1, rows, torch.ones(rows.shape)).sqrt()
    return roots.mean(0), roots.std(0).clamp(min=0.1)


def _next(model: nn.Module, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows[:, :-1]), rows[:, -1])


def _same(model: nn.Module, rows: Tensor) -> Tensor:
    x = histogram(rows)
    return mse_loss(model(x), x)


WORKLOADS = (
    Workload("lm", lambda: Lm(Shape(width=64, layers=2, context=64)), loss_of, 65, 32, 100),
    Workload("mlp", Mlp, _next, 17, 1024, 150),
    Workload("conv", Conv, loss_of, 65, 32, 150),
    Workload("autoencoder", Autoencoder, _same, 64, 1024, 200),
)


def followed(work: Workload, written: Any, *, horizon: float, seed: int, evaluations: int) -> list[tuple[float, float]]:
    """Train for `horizon` of the workload's steps; return the evaluations as (seconds of the processor, loss).

    The rate rises over a twentieth of these steps, rests, and falls to nothing over the last half; it stays where the
    optimizer is evaluated at an average. Evaluations do not count. A run whose loss is not finite ends.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = work.build()
    params = dict(model.named_parameters())
    rule = optimizer_methods.build(written)
    state = rule.init(params)
    hooks = LayerHooks.of(model, rule.wants_vectors(params))
    steps = max(2, round(horizon * work.steps))
    due = {round((k + 1) * steps / evaluations) for k in range(evaluations)}
    found, seconds = [], 0.0
    for step, rows in enumerate(_batches(work, seed, steps)):
        began = time.process_time()
        with hooks.open():
            loss = work.loss(model, rows)
            grads = torch.autograd.grad(loss, list(params.values()))
        rule.see({n: LayerVectors(s.input / s.positions, s.output) for n, s in hooks.sums.items()}, state)
        falling = 1.0 if rule.has_average else 2 * (steps - step) / steps
        scale = min(1.0, (step + 1) / max(1, steps // 20), falling)
        rule.update(params, dict(zip(params, grads, strict=True)), state, lr_scale=scale, step=step)
        seconds += time.process_time() - began
        if not math.isfinite(float(loss.detach())):
            break
        if step + 1 in due:
            mean = rule.average(params, state)
            found.append((round(seconds, 4), _checked(work, model, mean)))
    return found


def _batches(work: Workload, seed: int, steps: int) -> Iterator[Tensor]:
    train, _ = text()
    drawn = torch.Generator().manual_seed(2_000 + seed)
    for _ in range(steps):
        starts = torch.randint(0, len(train) - work.length, (work.rows,), generator=drawn)
        yield train[starts[:, None] + torch.arange(work.length)]


@torch.no_grad()
def _checked(work: Workload, model: nn.Module, instead: Mapping[str, Tensor]) -> float:
    """Return the validation loss, with some parameters as in `instead`."""
    _, held = text()
    own = {name: param.data for name, param in model.named_parameters() if name in instead}
    for name, param in model.named_parameters():
        param.data = instead.get(name, param.data)
    starts = torch.linspace(0, len(held) - work.length - 1, _CHECKED).long()
    parts = held[starts[:, None] + torch.arange(work.length)].chunk(16)  # what fits into the cache
    loss = sum(float(work.loss(model, part)) for part in parts) / len(parts)
    for name, param in model.named_parameters():
        param.data = own.get(name, param.data)
    return loss
