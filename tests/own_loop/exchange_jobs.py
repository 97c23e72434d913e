"""Loops whose exchanges follow the learning rates, and count the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.exchange.warmup import Warmup
from pool import Seat

_TOPK = {"error_feedback": {"inner": {"topk": {"fraction": 0.01}}}}
_TOPK_OF_THE_FIRST = {"error_feedback": {"inner": {"topk": {"fraction": 0.02}}}}


@contextmanager
def group(seat: Seat) -> Iterator[None]:
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(1)
        yield
    finally:
        dist.destroy_process_group()


def residuals(seat: Seat, *, rates: list[float], apart: bool = False, optimizers: int = 1) -> dict[str, float]:
    """Train two layers at a rate each; return the norm of the residual of every bucket, by the names it holds.

    apart: the layers have a bucket each. optimizers: 2 for one by layer.
    """
    with group(seat):
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(net, rates, strict=True)]
        each = [groups] if optimizers == 1 else [[group] for group in groups]
        moving: list[Any] = [torch.optim.SGD(one) for one in each]
        exchange: Any = [("^0", "all", _TOPK_OF_THE_FIRST), (".*", "all", _TOPK)] if apart else _TOPK
        gossamer.wrap(net, moving, exchange=exchange, loss="mean", timeout_s=10.0)
        for _ in range(4):
            net.zero_grad()
            net(torch.randn(8, 32)).square().mean().backward()
            for one in moving:
                one.step()
        slots = net.no_sync._passes._buckets.slots  # type: ignore[union-attr]
        norms = [float(sum(t.square().sum() for _, t in slot.state.flatten()) ** 0.5) for slot in slots]
        return {" ".join(e.name for e in slot.layout.entries): norm for slot, norm in zip(slots, norms, strict=True)}


def keys(seat: Seat, *, loop: str) -> list[tuple[list[int], bool]]:
    """Train by a loop for four steps; return the key of each pass, and whether it was one of the warm-up."""
    seen: list[tuple[list[int], bool]] = []
    plain = Warmup.run

    def run(self: Warmup, x: Any, state: Any, at: Any) -> Any:
        used = list(at.key), at.key[1] < self.steps
        if used not in seen[-1:]:  # all buckets of a pass have the same
            seen.append(used)
        return plain(self, x, state, at)

    with group(seat), mock.patch.object(Warmup, "run", run):
        net = nn.Linear(64, 64)
        exchange: Any = {"warmup": {"steps": 3, "inner": _TOPK}}
        accumulate = 4 if loop == "accumulate" else 1
        moving: list[Any] = [torch.optim.SGD([one], lr=0.1) for one in net.parameters()]
        settings: dict[str, Any] = {"exchange": exchange, "accumulate": accumulate, "seed": 7, "timeout_s": 10.0}
        gossamer.wrap(net, moving, loss="mean", **settings)
        step = made = 0
        while made < 4:
            is_lost = loop in ("rejected", "dropped") and step == 1
            step += 1
            net.zero_grad()
            for _ in range({"accumulate": 4, "two passes": 2}.get(loop, 1)):
                loss = net(torch.randn(8, 64)).square().mean()
                (loss * float("nan") if is_lost and loop == "rejected" else loss).backward()
            if is_lost and loop == "dropped":
                continue
            for one in moving:
                one.step()
            made += not is_lost
    return seen
