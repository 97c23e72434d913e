"""Measure what a message costs a rank's processors beside its encoding: hand-offs between threads, and the transport.

All ranks call it together, while no step is in flight. Small messages go through the communication thread while this
thread computes, as in a backward pass. What the other threads of the process compute meanwhile is theirs, so this
thread adds up one vector, which torch never divides among threads of its own, as it does matrix products:

    start_s     of a message of one number to the next rank
    hop_s       of each further hop: a sum of a thousand numbers, less that message
    byte_s      of a byte: a sum of up to a quarter of a million numbers, less its start and its hops

Bytes are measured inside islands where there are some: the fast links carry most of them. Through a slow link few go at
a time, and what little their hops take would be put down to them, a thousandfold where a bucket has megabytes.

Processor time tells these apart in a second; the length of the loop does not (it varies by more than they are).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, Rounds
from gossamer.comm.meter import hop_count, sent_bytes
from gossamer.plan.exchange import MessagePrice
from gossamer.spec.network import Network

_READINGS = 3
_MESSAGES, _LEAST = 32, 4  # of a reading
_READING_S = 0.25  # what a reading takes, unless its least messages take longer
_CARRIED_S = 0.02  # of the link: the bytes of a large message
_LARGEST_BYTES = 1 << 20
_FEW = 1 << 10  # numbers: each rank of a ring has some
_SUMS, _SUMMED = 64, 1 << 14  # running sums of so many numbers between two messages


def message_price(pump: CommThread, links: Network, device: torch.device) -> MessagePrice:
    """Return the price of messages over `pump`, the largest of all ranks."""
    channel = pump.channel
    if channel.levels.is_alone:
        return MessagePrice()
    group, level = channel.levels.group("all", channel.rank), _of_most_bytes(channel, links)
    near = channel.levels.group(level, channel.rank)
    large = max(_FEW, int(min(_LARGEST_BYTES, links.levels[level].bytes_per_s * _CARRIED_S)) // 4)
    made: tuple[Callable[[], Message], ...] = (
        lambda: _to_next(group, channel.rank, device),
        lambda: Message((torch.zeros(_FEW, device=device),), Collective.SUM),
        lambda: Message((torch.zeros(large, device=device),), Collective.SUM, level),
    )
    mine = [_beside_work(pump, one, _count(pump, one)) for one in made]
    sent = sum(sent_bytes(Collective.SUM, 4 * large, 4, near, channel.rank).values())
    hops = [hop_count(Collective.SUM, len(ranks)) - 1 for ranks in (group, near)]  # after the first
    rows = gathered(channel, [*mine, sent, *hops])
    start_s, few_s, large_s, moved, hops_of_few, hops_of_large = rows.max(0).values.tolist()
    # Differences of two clocks may come out below zero where a message takes next to nothing.
    start_s = max(0.0, start_s)
    hop_s = max(0.0, few_s - start_s) / max(1.0, hops_of_few)
    byte_s = max(0.0, large_s - start_s - hops_of_large * hop_s) / max(1.0, moved)
    return MessagePrice(start_s, byte_s, hop_s)


def _of_most_bytes(channel: Channel, links: Network) -> str:
    """Return the level over which most bytes of a step go: that of islands, if there are such with several ranks."""
    islands = channel.levels.groups.get("island", ())
    return "island" if "island" in links.levels and any(len(one) > 1 for one in islands) else "all"


def _to_next(group: tuple[int, ...], rank: int, device: torch.device) -> Message:
    """Return a message of one number to the next rank of the group."""
    me, ranks = group.index(rank), len(group)
    to, source = (me + 1) % ranks, (me - 1) % ranks
    splits, arriving = (tuple(int(place == one) for place in range(ranks)) for one in (to, source))
    return Message((torch.zeros(1, device=device),), Collective.SHUFFLE, splits=splits, arriving=arriving)


def _count(pump: CommThread, made: Callable[[], Message]) -> int:
    """Return the messages of a reading, the same on all ranks: as many as there is time for."""
    began = time.perf_counter()
    pump.channel.start(made()).wait()  # the first one connects
    between = time.perf_counter()
    pump.channel.start(made()).wait()
    alone_s = min(between - began, time.perf_counter() - between)
    slowest_s = float(gathered(pump.channel, [alone_s]).max())
    return max(_LEAST, min(_MESSAGES, int(_READING_S / max(slowest_s, 1e-6))))


def _beside_work(pump: CommThread, made: Callable[[], Message], count: int) -> float:
    """Return the processor seconds of the other threads for one of `count` messages; the median of some readings."""
    numbers, found = torch.ones(_SUMMED), list[float]()
    sums = torch.empty_like(numbers)
    for _ in range(_READINGS):
        messages = [made() for _ in range(count)]
        step = pump.begin([1] * count)
        others = time.process_time() - time.thread_time()
        for number, message in enumerate(messages):
            for _ in range(_SUMS):
                torch.cumsum(numbers, 0, out=sums)
            step.submit(number, _sent(message))
        for number in range(count):
            step.result(number)
        found.append((time.process_time() - time.thread_time() - others) / count)
    return median(found)


def _sent(message: Message) -> Rounds:
    (got,) = yield message
    return Outcome(_first(got), None, ExchangeState())


def _first(got: Tensor) -> Tensor:
    return got.flatten()[:1]
