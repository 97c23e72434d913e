"""Steps with a closure, as frameworks take them: the last backward pass of a group is inside of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.own_loop.gradient_hooks import release
from gossamer.spec.errors import BadInput
from pool import Seat


def trained(seat: Seat) -> dict[str, Any]:
    """Return the weights after steps of two micro-batches each, and the gradient of a backward pass afterwards.

    The closure returns no loss.
    """
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(8)]
        model, optimizer, loader = gossamer.wrap(net, optimizer, data, timeout_s=10.0)
        for index, batch in enumerate(loader):
            if index % 2 == 0:
                optimizer.zero_grad()
                with model.no_sync():
                    _backward(model, batch)
                continue

            def closure(last: Any = batch) -> None:
                _backward(model, last)

            optimizer.step(closure)
        weights = net.weight.detach().clone()
        release(model)
        net.zero_grad()
        if seat.rank == 0:  # the other rank does not come
            _backward(model, data[0])
        alone = None if net.weight.grad is None else net.weight.grad.tolist()
        return {"weights": weights.tolist(), "alone": alone}
    finally:
        dist.destroy_process_group()


def left_open(seat: Seat) -> str:
    """Return what a step is told whose closure has no backward pass after one inside of no_sync."""
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        data = [(torch.randn(4, 3), torch.randn(4, 2))]
        model, optimizer, loader = gossamer.wrap(net, optimizer, data, timeout_s=10.0)
        for batch in loader:
            with model.no_sync():
                _backward(model, batch)
        try:
            optimizer.step(lambda: None)
        except BadInput as error:
            return str(error)
        return ""
    finally:
        dist.destroy_process_group()


def clipped(seat: Seat, *, closes: bool) -> dict[str, Any]:
    """Return the weights after steps that are clipped, of which one is rejected; `closes`: whether they have a closure.

    A gradient of the last rank is not finite in step 3.
    """
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        data = [(torch.randn(4, 3), 50 * torch.randn(4, 2)) for _ in range(6)]
        model, optimizer, loader = gossamer.wrap(net, optimizer, data, max_grad_norm=0.5, timeout_s=10.0)
        losses: list[float] = []
        for index, batch in enumerate(loader):
            bad = index == 2 and seat.rank == seat.ranks - 1

            def closure(last: Any = batch, factor: float = math.nan if bad else 1.0) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(last[0]), last[1])
                loss.register_hook(lambda gradient: gradient * factor)
                loss.backward()
                return loss.detach()

            with told("gossamer.own_loop.optimizer_step") as said:
                if closes:
                    losses.append(float(optimizer.step(closure)))
                else:
                    closure()
                    optimizer.step()
            assert bool(said) == (index == 2), said
            assert not said or f"of rank {seat.ranks - 1}" in said[0]
        return {"weights": net.weight.tolist(), "rejected": optimizer.rejected, "losses": losses}
    finally:
        dist.destroy_process_group()


@contextmanager
def told(name: str) -> Iterator[list[str]]:
    """Collect what the logger `name` is given inside."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def _backward(model: nn.Module, batch: Any) -> None:
    (nn.functional.mse_loss(model(batch[0]), batch[1]) / 2).backward()
