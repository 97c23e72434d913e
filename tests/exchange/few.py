"""Sparse inputs, and one exchange of them in lockstep."""

from __future__ import annotations

import torch
from torch import Tensor

from exchange import crew
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import Outcome
from gossamer.exchange import Exchange

NUMEL = 50_000


def gaussian(numel: int = NUMEL, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sparse(density: float, numel: int = NUMEL, seed: int = 0) -> Tensor:
    there = torch.rand(numel, generator=torch.Generator().manual_seed(100 + seed)) < density
    return torch.where(there, gaussian(numel, seed), torch.zeros(()))


def layout(numel: int) -> Layout:
    return Layout.of({"w": torch.empty(numel)})


def exchanged(one: Exchange, inputs: list[Tensor], step: int = 0) -> tuple[list[Outcome], int]:
    """Outcomes of one exchange of all ranks, and the bytes that rank 0 sent."""
    where = layout(inputs[0].numel())
    given = [Bucket(where, x.clone()) for x in inputs]
    outcomes, channels = crew.world(one, len(inputs), given, [one.init(where)] * len(inputs), step)
    return outcomes, channels[0].meter.total_bytes


def weighted(inputs: list[Tensor]) -> Tensor:
    shares = crew.weights(len(inputs))
    return sum((shares[r] * x.double() for r, x in enumerate(inputs)), torch.zeros(inputs[0].numel()).double())
