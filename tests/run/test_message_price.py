"""What a message costs beside its encoding: measured through the communication thread, and counted by the clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from gossamer import autotune
from gossamer.autotune.message_price import message_price
from gossamer.comm.channel import Channel
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import Collective, Message, ProcessGroups, Traffic
from gossamer.comm.meter import sent_bytes
from gossamer.plan.exchange import (
    BucketMeasurements,
    Calibration,
    Candidate,
    MessagePrice,
    Option,
    PricedMessage,
    StepMeasurements,
    StepTimes,
    choose,
    priced,
    schedule,
)
from gossamer.spec.network import Link, Network

LINK = Link(latency_s=1e-4, bytes_per_s=1e8)
LINKS = Network(islands=((0, 1),), levels={"all": LINK})
EXACT = (Candidate("dense", "all-reduce", lossy=False),)


def measured(channel: Channel) -> MessagePrice:
    pump = CommThread(channel)
    try:
        return message_price(pump, LINKS, torch.device("cpu"))
    finally:
        pump.close()


def test_all_ranks_find_the_same_price_and_it_is_not_nothing() -> None:
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(measured, LocalChannel.world(3, ProcessGroups.flat(3), patience_s=30.0)))
    assert found[0] == found[1] == found[2]
    assert 0 < found[0].start_s < 1.0 and 0 <= found[0].byte_s < 1e-6 and 0 <= found[0].hop_s < 1.0
    assert "a message" in found[0].show()


THREADS_OF_THE_WORK = """
import os, threading, torch
from concurrent.futures import ThreadPoolExecutor
from gossamer.autotune.message_price import message_price
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.spec.network import Link, Network

def beside_python():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def measure(channel):  # with messages so small that torch adds them up in one thread
    pump = CommThread(channel, observe=lambda *_: seen.append(beside_python()))
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=1e-4, bytes_per_s=1e6)})
    message_price(pump, links, torch.device("cpu"))

torch.set_num_threads(4)
seen = [beside_python()]
with ThreadPoolExecutor(2) as ranks:
    list(ranks.map(measure, LocalChannel.world(2, ProcessGroups.flat(2), patience_s=30.0)))
print(len(seen) > 1, max(seen) - seen[0])
"""


def test_the_work_beside_messages_is_not_counted_as_theirs() -> None:
    """It must start no threads of torch: what these compute for it cannot be told from what messages take."""
    ran = subprocess.run([sys.executable, "-c", THREADS_OF_THE_WORK], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "0"]


def test_a_rank_that_is_alone_sends_nothing() -> None:
    (channel,) = LocalChannel.world(1)
    assert measured(channel) == MessagePrice()


@pytest.mark.parametrize("islands", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 1, 2), (3,))])
def test_start_hops_and_bytes_are_told_apart(
    islands: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow link carries few bytes at a time: the hops of their message are no price of bytes."""
    truth = MessagePrice(start_s=1e-3, byte_s=7e-10, hop_s=4e-4)
    levels = ProcessGroups.islands(islands) if len(islands) > 1 else ProcessGroups.flat(4)
    sums = set[tuple[str, int]]()

    def cost_s(pump: CommThread, made: Callable[[], Message], count: int) -> float:
        one, channel = made(), pump.channel
        if one.combine is Collective.SHUFFLE:
            return truth.of(4)
        sums.add((one.level, one.nbytes))
        group = channel.levels.group(one.level, channel.rank)
        sent = sum(sent_bytes(Collective.SUM, one.nbytes, 4, group, channel.rank).values())
        # The bytes of a few numbers are not told from their hops.
        return truth.of(sent if one.nbytes > 4096 else 1, 2 * (len(group) - 1))

    def measure(channel: Channel) -> MessagePrice:
        fast = {"island": LINK} if len(islands) > 1 else {}
        links = Network(islands=islands, levels={"all": Link(latency_s=1e-4, bytes_per_s=1e6), **fast})
        pump = CommThread(channel)
        try:
            return message_price(pump, links, torch.device("cpu"))
        finally:
            pump.close()

    monkeypatch.setattr(autotune.message_price, "_beside_work", cost_s)
    with ThreadPoolExecutor(4) as ranks:
        found = list(ranks.map(measure, LocalChannel.world(4, levels, patience_s=30.0)))
    assert found == [found[0]] * 4
    assert (found[0].start_s, found[0].hop_s) == pytest.approx((truth.start_s, truth.hop_s), rel=1e-3)
    assert found[0].byte_s == pytest.approx(truth.byte_s, rel=1e-2)
    large = ("island", 1 << 20) if len(islands) > 1 else ("all", 20_000)
    assert sums == {("all", 4096), large}, "bytes are measured where most of them go"


def test_each_message_that_carries_something_has_its_price() -> None:
    traffic = (Traffic(Collective.SUM, 1000, 4), Traffic(Collective.GATHER, 0, 1))
    price = MessagePrice(start_s=1e-3, byte_s=1e-6, hop_s=1e-4)
    messages, _ = priced(dict.fromkeys((0, 1), traffic), ProcessGroups.flat(2), LINKS, price)
    assert [one.start_s for one in messages] == pytest.approx([1e-3 + 1e-4 + 4000e-6, 0.0]), (
        "an all-reduce has two hops"
    )


def cut(buckets: int, start_s: float, *, wire_s: float = 0.02, stolen: float = 1.0) -> StepMeasurements:
    """Equal buckets of a backward pass of one second, whose messages keep the link busy for `wire_s` in all."""
    message = PricedMessage(wire_s / buckets, start_s=start_s)
    option = Option((0.0, 0.0), (message,), 8, 0.0)
    made = (BucketMeasurements((f"w{b}",), 1, (b + 1) / buckets, 0.0, (option,)) for b in range(buckets))
    return StepMeasurements(tuple(made), compute_s=1.5, backward_s=1.0, stolen=stolen)


def test_the_backward_pass_is_longer_by_what_messages_take_of_its_processor() -> None:
    """Of 50 buckets all but the last are sent while it runs; the last one's start is waited for."""
    free, dear = (cut(50, start_s) for start_s in (0.0, 2e-3))
    steps = [schedule(one, [b.option(0) for b in one.buckets]).step_s for one in (free, dear)]
    assert steps[1] - steps[0] == pytest.approx(50 * 2e-3, rel=1e-6)
    beside = cut(50, 2e-3, stolen=0.0)  # with a processor of their own
    assert schedule(beside, [b.option(0) for b in beside.buckets]).step_s == pytest.approx(steps[0] + 2e-3)


def test_dear_messages_make_buckets_few_and_cheap_ones_make_them_small() -> None:
    """50 buckets save 20 ms of waiting against 2, and cost 48 messages more."""
    for start_s, count in ((1e-5, 50), (2e-3, 2)):
        cuts = [cut(buckets, start_s, wire_s=0.2) for buckets in (50, 2)]
        assert len(choose(*cuts, lossy=False, candidates=EXACT).buckets) == count, start_s


def test_a_code_of_two_messages_is_left_where_these_cost_more_than_it_saves() -> None:
    harsh = Candidate({"error_feedback": {"two_shot": "int8"}}, "int8")
    for start_s, written in ((1e-4, harsh.written), (0.02, "dense")):
        dense = Option((0.0, 0.0), (PricedMessage(0.02, start_s=start_s),), 8, 0.0)
        coded = Option((0.0,) * 3, (PricedMessage(1e-3, start_s=start_s),) * 2, 2, 1e-4)
        bucket = BucketMeasurements(("w",), 1, 0.1, 1.0, (dense, coded))
        facts = StepMeasurements((bucket,), compute_s=0.2, backward_s=0.1, stolen=1.0)
        assert choose(facts, lossy=True, candidates=(*EXACT, harsh)).written == written


def test_what_messages_take_is_not_put_down_to_computing_or_encoding() -> None:
    """A step that takes what its messages' price says is as it was measured: nothing is corrected."""
    facts, picked = cut(20, 2e-3), (0,) * 20
    found = Calibration.fit(facts, picked, StepTimes.forecast(facts, picked))
    assert (found.compute, found.encode, found.messages) == pytest.approx((1.0, 1.0, 1.0))
    without = replace(facts, buckets=cut(20, 0.0).buckets)
    assert Calibration.fit(without, picked, StepTimes.forecast(facts, picked)).compute > 1.02
