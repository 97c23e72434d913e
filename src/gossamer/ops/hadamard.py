"""The Hadamard transform of groups of 32 numbers, which spreads each evenly over its group, and its exact inverse."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gossamer.ops.blocks import CHUNK

GROUP = 32


def hadamard(x: Tensor, out: Tensor, *, before: Tensor | None = None, after: Tensor | None = None) -> None:
    """Write H (before * x) * after to out, group by group: x and out (numel,) float32, GROUP dividing numel.

    H is the symmetric matrix of +1 and -1 with H H = 32 I; before and after are (GROUP,). out may be x.
    """
    inner = _matrix(GROUP // 2, x.device)
    room = torch.empty(min(CHUNK, x.numel()), dtype=torch.float32, device=x.device)
    for start in range(0, x.numel(), CHUNK):
        source, target = x[start : start + CHUNK].view(-1, GROUP), out[start : start + CHUNK].view(-1, GROUP)
        if before is not None:
            source = torch.mul(source, before, out=target)
        halves, mixed = source.view(-1, 2, GROUP // 2), room[: source.numel()].view(-1, 2, GROUP // 2)
        torch.add(halves[:, 0], halves[:, 1], out=mixed[:, 0])
        torch.sub(halves[:, 0], halves[:, 1], out=mixed[:, 1])
        torch.mm(mixed.view(-1, GROUP // 2), inner, out=target.view(-1, GROUP // 2))  # thrice as fast as one of 32
        if after is not None:
            target.mul_(after)


@cache
def _matrix(size: int, device: torch.device) -> Tensor:
    if size == 1:
        return torch.ones((1, 1), device=device)
    half = _matrix(size // 2, device)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])
