"""The communication volume of a plan, computed by the objects that later send the messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from gossamer.comm.bucket import Layout
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.message import Collective, ProcessGroups, Traffic
from gossamer.comm.row_gather import row_traffic
from gossamer.exchange import Exchange
from gossamer.exchange.codec import Codec
from gossamer.optimizer import Optimizer
from gossamer.recipe import PlanMethods
from gossamer.sharding import (
    ElementBytes,
    RowPartition,
    Sharding,
    TierShares,
    UnshardOrder,
    bytes_of,
    gather_traffic,
    holdings,
    longest_message_numel,
)
from gossamer.spec.plan import Plan
from gossamer.sync import OuterLoopConfig, StatusExchange, ZerothOrderConfig, buckets_of, traffic_of_round


def agreement(levels: ProcessGroups, level: str, rank: int) -> Iterator[Traffic]:
    """Yield the gathers of a step's votes over the ranks at `level`: every rank's weight before, its vote after."""
    for numbers in (1, 5):
        yield from row_traffic(numbers, 8, levels, level, rank)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Buckets = Sequence[tuple[Layout, Exchange]]


def gradient_buckets(shapes: Shapes, exchange: Mapping[str, Exchange], plan: Plan) -> Buckets:
    """Return the buckets of a replica's float32 gradients, each with its exchange, in the order backward fills them."""
    params = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes}
    return buckets_of(params, exchange, bucket_bytes=plan.bucket_bytes, named=plan.buckets)


def state_buckets(methods: PlanMethods, shapes: Shapes, deal: RowPartition) -> Buckets:
    """Return the same buckets for a sharding: each exchange delivers to the ranks that own the optimizer states."""
    exchange = methods.exchanges((name for name, _ in shapes), deal)
    return gradient_buckets(shapes, exchange, methods.plan)


def step_bytes(buckets: Buckets, levels: ProcessGroups, *, meets: str = "all") -> dict[str, int]:
    """Return the payload bytes of one training step per link ("0>1"), over all ranks.

    `meets`: the level at which gradients are averaged, `all` or `island`.
    """
    seen = levels if meets == "all" else levels.only(meets)

    def sent(rank: int) -> Iterator[Traffic]:
        yield from agreement(levels, levels.whole if meets == "all" else meets, rank)
        for layout, exchange in buckets:
            for one in exchange.traffic(layout, seen, rank):
                yield one if seen is levels else replace(one, level=meets)

    return by_link(levels, sent)


def share_bytes(walk: UnshardOrder, deal: RowPartition, microbatches: int) -> dict[str, int]:
    """Return at most the payload bytes per link of a step's all-gathers of weights in tiers."""
    return by_link(deal.levels, lambda rank: TierShares(deal, rank).traffic(walk, microbatches))


def mark_bytes(buckets: Buckets, levels: ProcessGroups) -> dict[str, int]:
    """Return the payload bytes per link of what goes with the gradients of states in tiers: who has any."""
    return by_link(levels, lambda rank: (Traffic(Collective.SUM, len(layout.entries), 4) for layout, _ in buckets))


def gather_bytes(buckets: Buckets, deal: RowPartition, differences: Codec | None) -> dict[str, int]:
    """Return the payload bytes per link of the all-gather of updated parameters after the optimizer step."""
    return by_link(
        deal.levels, lambda rank: (t for layout, _ in buckets for t in gather_traffic(layout, deal, rank, differences))
    )


def walk_bytes(walk: UnshardOrder, deal: RowPartition, microbatches: int) -> dict[str, int]:
    """Return the payload bytes per link of a step's all-gathers of sharded parameters."""
    return by_link(deal.levels, lambda rank: walk.traffic(deal, rank, microbatches))


def state_bytes(
    sharding: Sharding, walk: UnshardOrder, trained: Collection[str], levels: ProcessGroups, *, optimizer: Optimizer
) -> tuple[int, ...]:
    """Return by rank the bytes of parameters, gradients and optimizer states; exchange state is not counted."""
    deal = sharding.deal(levels)
    layouts = [layout for unit in (walk.always, *walk.units) for layout in unit.layouts]
    shapes, sizes = dict[str, tuple[int, ...]](), dict[str, ElementBytes]()
    for layout in layouts:
        size, wide = layout.dtype.itemsize, max(4, layout.dtype.itemsize)
        copies = (size < wide) + (sharding.differences is not None)  # in float32
        kind = torch.float32 if wide == 4 else torch.float64
        shapes |= {entry.name: entry.shape for entry in layout.entries}
        sizes |= {
            entry.name: ElementBytes(size, size, wide * copies, optimizer.row_bytes(entry.name, entry.shape, kind))
            for entry in layout.entries
        }
    frozen = shapes.keys() - frozenset(trained)

    def held(rank: int) -> int:
        mine = holdings(deal, shapes, rank, frozen=frozen).values()
        padding = sum(_padding(layout, deal.of_parameters, rank) * layout.dtype.itemsize for layout in layouts)
        return bytes_of(mine, sizes) + padding

    return tuple(held(rank) for rank in levels.everyone)


def _padding(layout: Layout, deal: RowPartition, rank: int) -> int:
    """Return the elements by which a bucket of a rank with any rows is longer than these: as long as the longest."""
    own = sum(numel for _, numel in deal.part(layout, rank))
    return longest_message_numel(layout, deal, rank) - own if rank in deal.givers(rank) else 0


def round_bytes(
    loop: OuterLoopConfig, shapes: Shapes, levels: ProcessGroups, *, units: Sequence[str], bucket_bytes: int
) -> dict[str, int]:
    """Return the payload bytes per link of all rounds in `loop.cycle` steps of local updates, over all ranks."""
    params = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes}
    return by_link(
        levels, lambda rank: traffic_of_round(loop, params, levels, rank, units=units, bucket_bytes=bucket_bytes)
    )


def word_bytes(loop: OuterLoopConfig, levels: ProcessGroups) -> dict[str, int]:
    """Return the mean payload bytes per link and step of status messages between replica groups, rounded down.

    Excludes the queries to a rank while others wait for it.
    """
    if len(levels.groups["island"]) == 1:
        return {}
    words, steps = (loop.fragments, loop.sync_every) if loop.straggler_timeout_s else (1, StatusExchange.every)
    return {link: sent * words // steps for link, sent in by_link(levels, lambda _: (StatusExchange.traffic,)).items()}


def probe_bytes(probe: ZerothOrderConfig, levels: ProcessGroups) -> dict[str, int]:
    """Return the payload bytes per link of a zeroth-order step."""
    return by_link(levels, lambda rank: (*agreement(levels, levels.whole, rank), *probe.traffic(levels, rank)))


def by_link(levels: ProcessGroups, sent: Callable[[int], Iterable[Traffic]]) -> dict[str, int]:
    """Return the payload bytes per link, from the traffic that every rank sends."""
    links: dict[str, int] = {}
    for rank in levels.everyone:
        channel = CountingChannel(rank, levels)
        channel.charge(sent(rank))
        links.update(channel.meter.snapshot())
    return links
