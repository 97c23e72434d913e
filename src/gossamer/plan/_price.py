"""Prices: the bytes of a plan, from the same objects that later run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from gossamer.compress import Exchange
from gossamer.compress.codec import Codec
from gossamer.memory import Deal, gather_traffic
from gossamer.sync import Loop, Probe, Word, buckets_of, traffic_of_round
from gossamer.wire.bucket import Layout
from gossamer.wire.channel.priced import Priced
from gossamer.wire.message import Combine, Levels, Traffic


def agreement(level: str) -> tuple[Traffic, ...]:
    """What every rank tells those of `level` in a step: its weight before, its vote after."""
    return (Traffic(Combine.GATHER, 1, 8, level), Traffic(Combine.GATHER, 5, 8, level))


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Buckets = Sequence[tuple[Layout, Exchange]]


def gradient_buckets(shapes: Shapes, exchange: Mapping[str, Exchange], *, bucket_bytes: int) -> Buckets:
    """The buckets a replica will cut its float32 gradients into, each with its exchange, as backward fills them."""
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes}
    return buckets_of(params, exchange, bucket_bytes=bucket_bytes)


def step_bytes(buckets: Buckets, levels: Levels, *, meets: str = "all") -> dict[str, int]:
    """Payload bytes of one training step per link ("0>1"), all ranks; gradients meet at the level `meets`."""
    seen = levels if meets == "all" else levels.only(meets)

    def sent(rank: int) -> Iterator[Traffic]:
        yield from agreement(levels.whole if meets == "all" else meets)
        for layout, exchange in buckets:
            for one in exchange.traffic(layout, seen, rank):
                yield one if seen is levels else replace(one, level=meets)

    return by_link(levels, sent)


def gather_bytes(buckets: Buckets, deal: Deal, weights: Codec | None) -> dict[str, int]:
    """Payload bytes per link of what every rank has updated, on its way to all others."""
    return by_link(
        deal.levels, lambda rank: (t for layout, _ in buckets for t in gather_traffic(layout, deal, rank, weights))
    )


def round_bytes(
    loop: Loop, shapes: Shapes, levels: Levels, *, units: Sequence[str], bucket_bytes: int
) -> dict[str, int]:
    """Payload bytes of `loop.cycle` steps of islands apart, of what meets in them, per link, all ranks."""
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes}
    return by_link(
        levels, lambda rank: traffic_of_round(loop, params, levels, rank, units=units, bucket_bytes=bucket_bytes)
    )


def word_bytes(levels: Levels) -> dict[str, int]:
    """Payload bytes per link of what ranks tell each other beside the steps, in a mean step, rounded down."""
    if len(levels.groups["island"]) == 1:
        return {}
    return {link: sent // Word.every for link, sent in by_link(levels, lambda _: (Word.traffic,)).items()}


def probe_bytes(probe: Probe, levels: Levels) -> dict[str, int]:
    """Payload bytes per link of a step that losses alone decide."""
    return by_link(levels, lambda rank: (*agreement(levels.whole), probe.traffic(levels)))


def by_link(levels: Levels, sent: Callable[[int], Iterable[Traffic]]) -> dict[str, int]:
    """Payload bytes per link of what every rank sends."""
    links: dict[str, int] = {}
    for rank in levels.everyone:
        channel = Priced(rank, levels)
        channel.charge(sent(rank))
        links.update(channel.meter.snapshot())
    return links
