"""Prices: the bytes of a plan, from the same objects that later run."""

from __future__ import annotations

import torch

from gossamer.compress import Exchange
from gossamer.wire.bucket import Layout, partition
from gossamer.wire.channel.priced import Priced
from gossamer.wire.message import Combine, Levels, Traffic

AGREEMENT = (Traffic(Combine.GATHER, 1, 8), Traffic(Combine.GATHER, 4, 8))  # weights before, votes after


def gradient_layouts(shapes: tuple[tuple[str, tuple[int, ...]], ...], *, bucket_bytes: int) -> tuple[Layout, ...]:
    """The buckets a replica will cut its float32 gradients into."""
    return partition({name: torch.empty(shape, device="meta") for name, shape in shapes}, bucket_bytes=bucket_bytes)


def step_bytes(exchange: Exchange, layouts: tuple[Layout, ...], levels: Levels) -> dict[str, int]:
    """Payload bytes of one training step per link ("0>1"), all ranks."""
    links: dict[str, int] = {}
    for rank in sorted({r for groups in levels.groups.values() for group in groups for r in group}):
        channel = Priced(rank, levels)
        channel.charge(AGREEMENT)
        for layout in layouts:
            channel.charge(exchange.traffic(layout, levels, rank))
        links.update(channel.meter.snapshot())
    return links
