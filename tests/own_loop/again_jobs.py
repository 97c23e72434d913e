"""Loops whose models are wrapped again, or let go: what the first wrap leaves behind."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import gossamer
from gossamer.own_loop.gradient_hooks import release
from own_loop.closure_jobs import told
from own_loop.exchange_jobs import group
from pool import Seat

TOPK = {"error_feedback": {"inner": {"topk": {"fraction": 0.05}}}}


def rejected(seat: Seat) -> dict[str, Any]:
    """Wrap twice, each time with an exchange that keeps residuals; a gradient of the last rank is not finite once."""
    with group(seat):
        model: Any = nn.Linear(16, 16)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        draw = torch.Generator().manual_seed(seat.rank)
        with told("gossamer.own_loop.optimizer_step") as said:
            for stage in range(2):
                model, optimizer, _ = gossamer.wrap(model, optimizer, exchange=TOPK, loss="mean", timeout_s=10.0)
                for step in range(6):
                    is_bad = stage == 1 and step == 2 and seat.rank == seat.ranks - 1
                    optimizer.zero_grad()
                    loss = model(torch.randn(4, 16, generator=draw)).square().mean()
                    (loss * math.nan if is_bad else loss).backward()
                    optimizer.step()
        return {"rejected": optimizer.rejected, "said": said, "weights": model.weight.tolist()}


def let_go(seat: Seat, *, again: str) -> dict[str, Any]:
    """Train with a hook on a parameter, and statistics over all ranks; then let the model go, and wrap it `again`.

    In between rank 0 trains by itself.
    """
    with group(seat):
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        seen: list[float] = []

        def clamp(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(float(gradient.norm()))
            return gradient.clamp(-0.01, 0.01)

        model[2].weight.register_hook(clamp)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        data = [(torch.randn(6, 3), torch.randn(6, 2)) for _ in range(3)]

        def train(batches: Any) -> None:
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()

        def wrapped(batch_norm: str) -> str:
            nonlocal model, optimizer
            model, optimizer, loader = gossamer.wrap(model, optimizer, data, batch_norm=batch_norm, timeout_s=10.0)
            train(loader)
            return type(model[1]).__name__

        layers = [wrapped("all")]
        release(model)
        layers.append(type(model[1]).__name__)
        is_own = list((model[2].weight._backward_hooks or {}).values()) == [clamp]
        before, weight = len(seen), model[0].weight.detach().clone()
        if seat.rank == 0:
            train(data[:1])
        alone = {
            "called": len(seen) - before,
            "largest": float(model[2].weight.grad.abs().max()),
            "moved": float((model[0].weight - weight).norm()),
        }
        layers += [wrapped("all"), wrapped(again)]
        weights = [p.tolist() for p in model.parameters()]
        return {"layers": layers, "is_own": is_own, "alone": alone, "weights": weights, "calls": len(seen)}


def memory(seat: Seat, *, exchange: Any, keeps: bool, accumulate: int) -> int:
    """Return in how many pieces of memory gradients came, in 6 steps; `keeps`: whether the last ones are kept."""
    with group(seat):
        model: Any = nn.Linear(64, 64)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, _ = gossamer.wrap(
            model, optimizer, exchange=exchange, loss="mean", accumulate=accumulate, timeout_s=10.0
        )
        kept: list[Any] = []
        found: list[int] = []
        for _ in range(6):
            for _ in range(accumulate):
                model(torch.randn(4, 64)).square().mean().backward()
            found.append(model.weight.grad.data_ptr())
            kept += [model.weight.grad] if keeps else []
            optimizer.step()
            optimizer.zero_grad()
        return len(set(found))
