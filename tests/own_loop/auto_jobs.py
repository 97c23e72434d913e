"""Loops with exchange="auto" on ranks that believe they are on hosts of their own, and what was profiled of them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer
from gossamer.own_loop.exchange_choice import PassProfile
from gossamer.spec.errors import BadInput, PeerLost
from pool import Seat

FORWARD_S = BACKWARD_S = 0.01  # that the model sleeps
LATE_S = 1.0  # that the last rank sleeps before a backward pass, where it is late
_ROWS = 32  # of the embedding for each rank, which no other rank uses
_STEPS = 6


class Slow(nn.Module):
    """A model whose forward and backward passes take a known time at least."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(3 * _ROWS, 8, sparse=sparse)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        hidden: Tensor = self.first(self.rows(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(BACKWARD_S))
        out: Tensor = self.last(hidden)
        return out


@dataclass
class Seen:
    """What a loop has profiled, chosen and said, in the order of its models."""

    rank: int
    stepped_s: float = 0.0
    steps: int = 0
    profiles: list[dict[str, Any]] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def wrap(self, model: Any, optimizer: Any, **settings: Any) -> None:
        """Wrap the loop, and watch the steps of its optimizers."""
        gossamer.wrap(model, optimizer, exchange="auto", loss="mean", **{"timeout_s": 10.0, **settings})
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.register_step_post_hook(self._stepped)

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of the next micro-batch: of rows that no other one has, nor another rank."""
        at = 2 * next(self._numbers) % _ROWS + self.rank * _ROWS
        found: Tensor = model(torch.tensor([at, at + 1])).square().mean()
        return found

    def result(self, *models: nn.Module) -> dict[str, Any]:
        """Return what was seen, and a hash of the models."""
        flat = torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        keys = ("profiles", "chosen", "said", "steps")
        return {"digest": digest, "is_finite": bool(flat.isfinite().all()), **{k: getattr(self, k) for k in keys}}

    def _stepped(self, *_: Any) -> None:
        self.steps, self.stepped_s = self.steps + 1, time.perf_counter()


@contextmanager
def hosts(seat: Seat) -> Iterator[Seen]:
    """Open the group of ranks, each on a host of its own by name, and watch what is profiled and chosen."""
    seen, plain, choose = Seen(seat.rank), PassProfile.rehearsal, PassProfile.choose

    def rehearsal(self: PassProfile, params: Any) -> Any:
        span_s = time.perf_counter() - seen.stepped_s
        found = plain(self, params)
        rows = found.gradients["rows.weight"].abs().sum(1).nonzero().flatten().tolist()
        times = {"compute_s": found.compute_s, "backward_s": found.backward_s, "span_s": span_s}
        seen.profiles.append({**times, "ready_s": found.ready_s, "rows": rows, "after": seen.steps + 1})
        return found

    def chosen(self: PassProfile, params: Any, pump: Any) -> Any:
        found = choose(self, params, pump)
        seen.chosen.append(str(found))
        return found

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.said.append(record.getMessage())

    log, kept = logging.getLogger("gossamer.own_loop"), Kept()
    log.addHandler(kept)
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        with (
            mock.patch.object(socket, "gethostname", lambda: f"host{seat.rank}"),
            mock.patch.object(PassProfile, "rehearsal", rehearsal),
            mock.patch.object(PassProfile, "choose", chosen),
        ):
            yield seen
    finally:
        log.removeHandler(kept)
        dist.destroy_process_group()


def trained(seat: Seat, *, loop: str) -> dict[str, Any]:
    """Train by one of the loops below; what was seen."""
    torch.manual_seed(1)
    with hosts(seat) as seen:
        return LOOPS[loop](seen)


def _made(*, sparse: bool = False) -> tuple[nn.Module, Any]:
    model = Slow(sparse=sparse)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _by_passes(passes: int, *, sparse: bool = False, **settings: Any) -> Callable[[Seen], dict[str, Any]]:
    """A loop with so many backward passes before each step. sparse: whether the embedding's own gradients are."""

    def loop(seen: Seen) -> dict[str, Any]:
        model, optimizer = _made(sparse=sparse)
        seen.wrap(model, optimizer, **settings)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            for _ in range(passes):
                seen.loss(model).backward()
            optimizer.step()
        return seen.result(model)

    return loop


def _no_sync(seen: Seen) -> dict[str, Any]:
    model, optimizer = _made()
    seen.wrap(model, optimizer)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        with model.no_sync():  # type: ignore[operator]
            for _ in range(2):
                seen.loss(model).backward()
        seen.loss(model).backward()
        optimizer.step()
    return seen.result(model)


def _late(seen: Seen) -> dict[str, Any]:
    """Two passes before each step, for each of which the first rank waits."""
    model, optimizer = _made()
    seen.wrap(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = seen.loss(model)
            time.sleep(LATE_S if seen.rank else 0.0)
            loss.backward()
        optimizer.step()
    return seen.result(model)


def _scaled(seen: Seen) -> dict[str, Any]:
    """A GradScaler whose first scale is too large for the first step."""
    model, optimizer = _made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-127)
    seen.wrap(model, optimizer)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        scaler.scale(1000 * seen.loss(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    return seen.result(model)


def _skipped(seen: Seen) -> dict[str, Any]:
    """A loop that leaves out its second step and fills the gradients with zeros."""
    model, optimizer = _made()
    seen.wrap(model, optimizer)
    for step in range(_STEPS):
        seen.loss(model).backward()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return seen.result(model)


def _rejected(seen: Seen) -> dict[str, Any]:
    """A loop whose second step has a gradient that is not finite."""
    model, optimizer = _made()
    seen.wrap(model, optimizer)
    for step in range(_STEPS):
        optimizer.zero_grad()
        (seen.loss(model) * (float("nan") if step == 1 else 1.0)).backward()
        optimizer.step()
    return seen.result(model)


def _lbfgs(seen: Seen) -> dict[str, Any]:
    model = Slow()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    seen.wrap(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = seen.loss(model)
        loss.backward()
        return loss

    for _ in range(_STEPS):
        optimizer.step(closure)
    return seen.result(model)


def _two_models(seen: Seen) -> dict[str, Any]:
    """Two models that step in turns; the backward pass of the second reaches the first, which drops what it got."""
    (one, first), (two, second) = _made(), _made()
    seen.wrap([one, two], [first, second])
    for _ in range(_STEPS):
        first.zero_grad()
        seen.loss(one).backward()
        first.step()
        second.zero_grad()
        (seen.loss(two) + seen.loss(one)).backward()
        second.step()
    return seen.result(one, two)


def _unseen(seen: Seen) -> dict[str, Any]:
    """A loop that has imported backward before gossamer.wrap."""
    model, optimizer = _made()
    seen.wrap(model, optimizer)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward.__wrapped__(seen.loss(model))  # type: ignore[attr-defined]
        optimizer.step()
    return seen.result(model)


def _by_hand(seen: Seen) -> dict[str, Any]:
    """A loop that moves its parameters by itself."""
    model = nn.Linear(2, 1)
    seen.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(50):
        model(torch.ones(1, 2)).square().mean().backward()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)  # type: ignore[arg-type]
                param.grad = None
    return seen.result(model)


LOOPS: dict[str, Callable[[Seen], dict[str, Any]]] = {
    "plain": _by_passes(1),
    "sparse": _by_passes(1, sparse=True),
    "accumulate 2": _by_passes(2, sparse=True, accumulate=2),
    "accumulate 4": _by_passes(4, accumulate=4),
    "two backwards": _by_passes(2),
    "no_sync": _no_sync,
    "late": _late,
    "scaled": _scaled,
    "skipped": _skipped,
    "rejected": _rejected,
    "lbfgs": _lbfgs,
    "two models": _two_models,
    "unseen": _unseen,
    "by hand": _by_hand,
}


def left(seat: Seat, *, at: str) -> str:
    """The second rank leaves where its profile is asked for `at`; what the others are told."""
    leaves = property(_left) if at == "found" else _left
    with hosts(seat) as seen, mock.patch.object(PassProfile, at, leaves) if seat.rank == 1 else nullcontext():
        model, optimizer = _made()
        seen.wrap(model, optimizer, timeout_s=5.0)
        try:
            for _ in range(2):
                optimizer.zero_grad()
                seen.loss(model).backward()
                optimizer.step()
        except PeerLost as error:
            (seat.folder / f"told{seat.rank}").touch()
            return str(error)
        except _Left:
            _waits_for_others(seat)
    return ""


class _Left(Exception):
    pass


def _left(*_: Any) -> Any:
    raise _Left


def _waits_for_others(seat: Seat) -> None:
    """Keep the process, and its sockets, until the other ranks are told."""
    deadline = time.monotonic() + 30.0
    others = [rank for rank in range(seat.ranks) if rank != seat.rank]
    while time.monotonic() < deadline and not all((seat.folder / f"told{rank}").exists() for rank in others):
        time.sleep(0.05)


def alone(seat: Seat) -> str:
    """The second rank opens the process group and does not wrap; what the first one is told."""
    dist.init_process_group("gloo", store=seat.store(), rank=seat.rank, world_size=seat.ranks)
    try:
        if seat.rank == 1:
            _waits_for_others(seat)
            return ""
        model, optimizer = _made()
        try:
            gossamer.wrap(model, optimizer, timeout_s=1.0)
        except PeerLost as error:
            return str(error)
        finally:
            (seat.folder / "told0").touch()
        return ""
    finally:
        dist.destroy_process_group()


def untold_scaler(seat: Seat, *, enabled: bool) -> dict[str, Any]:
    """A GradScaler that gossamer.wrap does not know, beside an exchange that may come to keep residuals."""
    with hosts(seat) as seen:
        model, optimizer = _made()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=enabled)
        seen.wrap(model, optimizer, lossy=True)
        try:
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(seen.loss(model)).backward()
                scaler.step(optimizer)
                scaler.update()
        except BadInput as error:
            return {"said": str(error), "steps": seen.steps}
        return {"said": "", "steps": seen.steps}
