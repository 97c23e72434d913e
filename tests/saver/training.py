"""Short trainings of small modules with savers, as the engine of a run trains them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import loss
from gossamer.model.forward_adapter import caller_of
from gossamer.model.precision import precision_of
from gossamer.model.unit_seeds import unit_seeds
from gossamer.model.units import unit_names
from gossamer.saver import Saver, Site, install_all
from model.tiny import batch

CPU = torch.device("cpu")


class Busy(nn.Module):
    """Blocks with dropout, batch norm, a counter, a list and Python's random numbers, all of which the result shows."""

    def __init__(self, width: int = 16, layers: int = 3, vocabulary: int = 257) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(BusyBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, residual=h)
        return self.head(h)


class BusyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.register_buffer("mean", torch.ones(()))
        self.calls, self.seen = 0, []

    def forward(self, h: Tensor, residual: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.mean.mul_(0.9).add_(h.detach().abs().mean())
        x = self.norm(self.mix(h).transpose(1, 2)).transpose(1, 2) * (self.mean + random.random() / len(self.seen))
        return residual + self.drop(torch.tanh(x))


def trained(
    make: Callable[[], nn.Module],
    savers: Sequence[Saver],
    *,
    steps: int = 3,
    pieces: int = 2,
    precision: Any = "fp32",
    watch: Callable[[nn.Module], None] = lambda module: None,
) -> dict[str, Any]:
    """Parameters, buffers, losses and what blocks count, after some steps of micro-batches."""
    torch.manual_seed(0)
    module = make().train()
    computing = precision_of(precision)
    seeds = unit_seeds(module, seed=1)
    site = Site(units=unit_names(module), objective=loss.build("next_token"))
    installed = install_all(savers, module, site)
    watch(module)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-2), []
    for step in range(steps):
        optimizer.zero_grad()
        for piece in range(pieces):
            rows = batch(seed=step * pieces + piece)
            with seeds.at(step, piece), computing.autocast(CPU):
                one = installed.objective(caller_of(module, rows)(module, rows), rows).float()
            losses.append(float(one.detach()))
            with seeds.at(step, piece):
                (one / pieces).backward()
        optimizer.step()
    installed.remove()
    assert not forwards(module, seeds), "savers and seeds leave no forward behind"
    counts = [(m.calls, list(m.seen)) for m in module.modules() if isinstance(m, BusyBlock)]
    return {"state": module.state_dict(), "losses": losses, "counts": counts}


def forwards(module: nn.Module, seeds: Any) -> list[str]:
    """Names of modules that have a forward of their own once the seeding is gone too."""
    seeds.remove()
    return [name for name, inner in module.named_modules() if "forward" in vars(inner)]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two trainings are the same bit for bit."""
    same = all(torch.equal(tensor, other["state"][name]) for name, tensor in one["state"].items())
    return same and one["losses"] == other["losses"] and one["counts"] == other["counts"]
