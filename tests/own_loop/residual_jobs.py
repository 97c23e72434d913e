"""Loops with exchanges that keep what they have not sent: what becomes of it where a step is not taken."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer
from gossamer.spec.errors import BadInput
from own_loop.closure_jobs import told
from pool import Seat

TOPK = {"error_feedback": {"inner": {"topk": {"fraction": 0.05}}}}


def two_optimizers(seat: Seat, *, one_model: bool, head_first: bool, scales: bool) -> dict[str, Any]:
    """Train a body and a head, each by its optimizer: as one model, or as two.

    A gradient of the body overflows on rank 1 in step 3, and the head makes no step 5.
    """
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(0)
        body, head = nn.Linear(16, 16), nn.Linear(16, 16)
        models = nn.Sequential(body, head) if one_model else [body, head]
        first: Any = torch.optim.SGD(body.parameters(), 0.1)
        second: Any = torch.optim.AdamW(head.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
        kept, (first, second), _ = gossamer.wrap(
            models, [first, second], exchange=TOPK, loss="mean", scaler=scaler, timeout_s=10.0
        )
        draw = torch.Generator().manual_seed(seat.rank)
        for step in range(9):
            first.zero_grad()
            second.zero_grad()
            between = body(torch.randn(4, 16, generator=draw))
            if step == 3 and seat.rank == 1:
                between.register_hook(lambda gradient: gradient * math.inf)
            scaler.scale(head(between).square().mean()).backward()
            for one in (second, first) if head_first else (first, second):
                if one is not second or step != 5:
                    scaler.step(one)
            scaler.update()
        del kept
        weights = [p.tolist() for one in (body, head) for p in one.parameters()]
        return {"weights": weights, "rejected": [first.rejected, second.rejected]}
    finally:
        dist.destroy_process_group()


def given_later(seat: Seat) -> str:
    """Return what a step is told where parameters of one bucket are given to two optimizers after the start."""
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        optimizers: Any = [torch.optim.SGD(model[at].parameters(), 0.1) for at in range(2)]
        model, optimizers, _ = gossamer.wrap(model, optimizers, exchange=TOPK, loss="mean", timeout_s=10.0)
        optimizers[0].add_param_group({"params": [model[2].weight]})
        optimizers[1].add_param_group({"params": [model[2].bias]})
        model(torch.randn(4, 4)).square().mean().backward()
        try:
            optimizers[0].step()
        except BadInput as error:
            return str(error)
        return ""
    finally:
        dist.destroy_process_group()


def hidden(seat: Seat, *, exchange: Any, at: int) -> dict[str, Any]:
    """Train on with a gradient of the last rank that is not finite in step `at`, in one number out of many.

    Returns the steps whose gradient was not finite on this rank, and what the steps were told.
    """
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(0)
        model = nn.Linear(20, 20, bias=False)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, _ = gossamer.wrap(model, optimizer, exchange=exchange, loss="mean", timeout_s=10.0)
        draw = torch.Generator().manual_seed(seat.rank)
        seen: list[int] = []
        with told("gossamer.own_loop.optimizer_step") as said:
            for step in range(24):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 20, generator=draw)).square().mean()
                if step == at and seat.rank == seat.ranks - 1:
                    loss = loss + model.weight[0, 0] * math.nan
                loss.backward()
                if not math.isfinite(float(model.weight.grad.sum())):
                    seen.append(step)
                optimizer.step()
        return {"seen": seen, "rejected": optimizer.rejected, "said": said, "weights": model.weight.tolist()}
    finally:
        dist.destroy_process_group()


def frozen(seat: Seat) -> dict[str, Any]:
    """Freeze a layer in the midst of training, and unfreeze it later: what it moved by, and what it was owed."""
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, _ = gossamer.wrap(model, optimizer, exchange=TOPK, loss="mean", timeout_s=10.0)
        draw = torch.Generator().manual_seed(seat.rank)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.randn(4, 16, generator=draw)).square().mean().backward()
                optimizer.step()

        steps(4)
        model[0].requires_grad_(False)
        before, owed, other = model[0].weight.clone(), _owed(model, "0.weight"), _owed(model, "1.weight")
        steps(4)
        found = {
            "moved": float((model[0].weight - before).norm()),
            "is_none": model[0].weight.grad is None,
            "owed": float(owed.norm()),
            "kept": torch.equal(owed, _owed(model, "0.weight")),
            "others": not torch.equal(other, _owed(model, "1.weight")),
        }
        model[0].requires_grad_(True)
        steps(1)
        return {**found, "moved_later": float((model[0].weight - before).norm())}
    finally:
        dist.destroy_process_group()


def _owed(model: Any, name: str) -> Tensor:
    """Return what error feedback owes a parameter."""
    slot = model.no_sync._passes._buckets.slot_of(name)
    entry = next(one for one in slot.layout.entries if one.name == name)
    return dict(slot.state.flatten())["e"][entry.start : entry.start + entry.numel].clone()
