"""Loops in which one rank does something by itself, long after the start."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.spec.errors import WireMismatch
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
