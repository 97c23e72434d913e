"""What every habit uses: a small net, its batches, and this process's place among all.

All of it is the same on every rank, and in the one process of plain torch that a loop is compared with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROWS, WIDTH, CLASSES = 8, 6, 4
_STEPS = 12


def steps() -> int:
    """How many batches a loop is to see: few in fp32."""
    return _STEPS


def set_steps(count: int) -> None:
    global _STEPS
    _STEPS = count


def rank() -> int:
    """As scripts ask for it."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def net(seed: int = 1, inputs: int = WIDTH, outputs: int = CLASSES) -> nn.Sequential:
    """Three layers, so that there is a first, a middle and a last; it leaves the global generator as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(model: nn.Module | Iterable[nn.Parameter], lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters() if isinstance(model, nn.Module) else model, lr, momentum=0.9)


def dataset(rows: int = 0, seed: int = 0) -> TensorDataset:
    """(x, y) for classification: as many rows as the steps of one epoch take, or `rows`."""
    rows = rows or ROWS * steps()
    draw = seeded(seed)
    return TensorDataset(torch.randn(rows, WIDTH, generator=draw), torch.randint(CLASSES, (rows,), generator=draw))


def batches(rows: int = ROWS, seed: int = 0, count: int = 0) -> list[tuple[Tensor, Tensor]]:
    """One epoch of (x, y), as a list."""
    x, y = dataset(rows * (count or steps()), seed).tensors
    return list(zip(x.split(rows), y.split(rows), strict=True))


def pairs(rows: int = ROWS, outputs: int = CLASSES, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """One epoch of (x, y) for regression."""
    draw = seeded(seed)
    return [
        (torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, outputs, generator=draw)) for _ in range(steps())
    ]


def texts(rows: int = ROWS, length: int = 7, vocabulary: int = 11, ragged: bool = True) -> list[dict[str, Tensor]]:
    """Token ids with an attention mask; every row has a length of its own where `ragged`."""
    draw, found = seeded(5), []
    for _ in range(steps()):
        ids = torch.randint(3, vocabulary, (rows, length), generator=draw)
        lengths = torch.randint(2, length + 1, (rows, 1), generator=draw) if ragged else torch.full((rows, 1), length)
        mask = (torch.arange(length) < lengths).long()
        found.append({"input_ids": ids * mask, "attention_mask": mask})
    return found


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)
