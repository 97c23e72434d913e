"""Prices: the bytes of a plan, from the same objects that later run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gossamer.compress import Exchange
from gossamer.sync import buckets_of
from gossamer.wire.bucket import Layout
from gossamer.wire.channel.priced import Priced
from gossamer.wire.message import Combine, Levels, Traffic


def agreement(levels: Levels) -> tuple[Traffic, ...]:
    """What every rank tells all others in a step: its weight before, its vote after."""
    return (Traffic(Combine.GATHER, 1, 8, levels.whole), Traffic(Combine.GATHER, 5, 8, levels.whole))


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Buckets = Sequence[tuple[Layout, Exchange]]


def gradient_buckets(shapes: Shapes, exchange: Mapping[str, Exchange], *, bucket_bytes: int) -> Buckets:
    """The buckets a replica will cut its float32 gradients into, each with its exchange, as backward fills them."""
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes}
    return buckets_of(params, exchange, bucket_bytes=bucket_bytes)


def step_bytes(buckets: Buckets, levels: Levels) -> dict[str, int]:
    """Payload bytes of one training step per link ("0>1"), all ranks."""
    links: dict[str, int] = {}
    for rank in sorted({r for groups in levels.groups.values() for group in groups for r in group}):
        channel = Priced(rank, levels)
        channel.charge(agreement(levels))
        for layout, exchange in buckets:
            channel.charge(exchange.traffic(layout, levels, rank))
        links.update(channel.meter.snapshot())
    return links
