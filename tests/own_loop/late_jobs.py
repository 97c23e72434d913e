"""Loops in which one rank does something by itself, long after the start."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
import gossamer.own_loop  # before ranks meet: an import takes seconds where all cores are busy
from gossamer.spec.errors import PeerLost, WireMismatch
from pool import Seat


def parted(seat: Seat, *, what: str, at: int) -> dict[str, Any]:
    """The last rank changes `what` at step `at`. What it is told, and after how many steps."""
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        net.register_buffer("used", torch.zeros(2))
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(40)]
        model, optimizer, loader = gossamer.wrap(net, optimizer, data, timeout_s=10.0)
        done = 0
        try:
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                if step == at and seat.rank == seat.ranks - 1:
                    _change(what, net, optimizer)
                optimizer.step()
                done = step + 1
        except WireMismatch as error:
            return {"said": str(error), "done": done}
        return {"said": "", "done": done}
    finally:
        dist.destroy_process_group()


def _change(what: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        if what == "gradients":
            net.weight.grad.neg_()  # type: ignore[operator, union-attr]
        elif what == "settings":
            optimizer.param_groups[0]["lr"] *= 0.5
        elif what == "parameters":
            net.weight.mul_(1.01)  # type: ignore[operator]
        else:
            net.used.add_(1.0)  # type: ignore[operator]


def leaving(seat: Seat, *, timeout_s: float) -> dict[str, Any]:
    """Rank 0 leaves the loop after one pass over a shuffled loader. What this rank is told, and after how long."""
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        model, optimizer, loader = _shuffled(None, timeout_s)
        began_s = time.monotonic()
        try:
            for _ in range(3):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
                if seat.rank == 0:
                    break
                began_s = time.monotonic()
        except PeerLost as error:
            return {"said": str(error), "seconds": time.monotonic() - began_s}
        return {"said": "", "seconds": 0.0}
    finally:
        dist.destroy_process_group()


def noise(seat: Seat, *, own: bool) -> list[float]:
    """What ranks that are seeded apart draw in each pass over a shuffled loader, which may have a generator (`own`)."""
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        _, _, loader = _shuffled(torch.Generator() if own else None, 10.0)
        torch.manual_seed(seat.rank)
        return [float(torch.rand(())) for _ in range(2) for index, _ in enumerate(loader) if index == 0]
    finally:
        dist.destroy_process_group()


def _shuffled(order: torch.Generator | None, timeout_s: float) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    net = nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(16, 3), torch.randn(16, 2))
    given = DataLoader(rows, batch_size=4, shuffle=True, generator=order)
    return gossamer.wrap(net, optimizer, given, timeout_s=timeout_s)
