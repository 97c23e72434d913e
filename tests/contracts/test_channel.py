"""What every channel must do: combine as `Collective` says, count what it sends, and agree with the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from comm.letter_jobs import write
from gossamer.comm.channel import carry
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, ProcessGroups, Traffic
from gossamer.comm.meter import ring_chunks, sent_bytes
from gossamer.spec.errors import PeerLost, WireMismatch


def lockstep_replies(ranks: int) -> list[dict]:
    channels = LocalChannel.world(ranks)
    rows = 6 % ranks == 0
    sent = [torch.arange(6.0).view(ranks, -1) * 10**r if rows else torch.ones(ranks, 2) for r in range(ranks)]
    found: list[dict] = [{} for _ in range(ranks)]
    for how in Collective:
        parts = [x.int() if how is Collective.OR else x.clone() for x in sent]
        pending = [c.start(Message((x,), how)) for c, x in zip(channels, parts, strict=True)]
        for rank, one in enumerate(pending):
            found[rank][how.value] = one.wait()[0].tolist()
    for rank, channel in enumerate(channels):
        found[rank]["bytes"] = channel.meter.snapshot()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_group_and_lockstep_agree_bit_for_bit(pool, ranks: int) -> None:
    """Sums here are of whole numbers, so the backend's order of summing cannot show."""
    assert pool.run("comm.jobs:combine_all", ranks) == lockstep_replies(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("how", list(Collective))
def test_priced_counts_what_lockstep_counts(ranks: int, how: Collective) -> None:
    traffic = Traffic(how, ranks * 7, 4)
    channels = LocalChannel.world(ranks)
    for channel in channels:
        channel.start(
            Message((torch.zeros(ranks, 7, dtype=torch.int32 if how is Collective.OR else torch.float32),), how)
        )
    for channel in channels:
        priced = CountingChannel(channel.rank, channel.levels)
        priced.charge([traffic])
        assert priced.meter.snapshot() == channel.meter.snapshot()


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("elements", [0, 1, 5, 1000, 10**6 + 3])
def test_a_ring_moves_twice_n_minus_one_times_the_bytes(ranks: int, elements: int) -> None:
    group = tuple(range(ranks))
    total = sum(sum(sent_bytes(Collective.SUM, 4 * elements, 4, group, r).values()) for r in group)
    assert total == 2 * (ranks - 1) * 4 * elements
    if elements:
        assert sum(ring_chunks(4 * elements, 4, ranks)) == 4 * elements


def test_bits_are_combined_and_not_added() -> None:
    channels = LocalChannel.world(3)
    sent = [torch.tensor([1 << rank, 6, 128], dtype=torch.uint8) for rank in range(3)]
    pending = [c.start(Message((x,), Collective.OR)) for c, x in zip(channels, sent, strict=True)]
    assert [p.wait()[0].tolist() for p in pending] == [[7, 6, 128]] * 3


def test_levels_keep_groups_apart() -> None:
    levels = ProcessGroups({"all": ((0, 1, 2, 3),), "island": ((0, 1), (2, 3))})
    channels = LocalChannel.world(4, levels)
    pending = [c.start(Message((torch.tensor([float(c.rank)]),), Collective.SUM, "island")) for c in channels]
    assert [p.wait()[0].item() for p in pending] == [1.0, 1.0, 5.0, 5.0]


def test_ranks_that_disagree_are_named() -> None:
    channels = LocalChannel.world(2)
    pending = [c.start(Message((torch.zeros(c.rank + 1),), Collective.SUM)) for c in channels]
    with pytest.raises(WireMismatch, match="rank 1 sent"):
        pending[0].wait()


def test_two_ranks_write_to_each_other_without_the_third(pool) -> None:
    """In the order of sending, whatever is waited for first; over a process group as in lockstep."""
    threads = ThreadPoolExecutor(3)
    wanted = list(threads.map(write, range(3), LocalChannel.world(3, patience_s=10.0)))
    threads.shutdown()
    assert wanted[0]["got"] == [[[21.0] * 3] * 2, [[20.0] * 3] * 2]
    assert wanted[0]["bytes"] == {"0>2": 48} and wanted[1]["bytes"] == {}
    found = pool.run("comm.letter_jobs:letters", 3)
    assert [one.pop("sum") for one in found] == [3.0] * 3
    assert [one["got"] for one in found] == [one["got"] for one in wanted]


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("kind", [LocalChannel, CountingChannel, LoopbackChannel])
def test_a_message_to_one_rank_is_counted_alike(kind: type, rows: int) -> None:
    """Empty ones included; the reply of whoever awaits nothing is empty."""
    levels = ProcessGroups.flat(3)
    channel = LocalChannel.world(3)[1] if kind is LocalChannel else kind(1, levels)
    message = Message((torch.zeros(rows, 5),), Collective.SHUFFLE, "all", (rows, 0, 0), (0, 0, 0))
    (reply,) = channel.start(message).wait()
    assert reply.shape == (0, 5)
    assert channel.meter.snapshot() == ({"1>0": 20 * rows} if rows else {})


def test_a_rank_that_awaits_other_rows_is_told_who_sent_what() -> None:
    first, second = LocalChannel.world(2)
    first.start(Message((torch.zeros(3, 2),), Collective.SHUFFLE, "all", (0, 3), (0, 0)))
    awaited = second.start(Message((torch.zeros(0, 2),), Collective.SHUFFLE, "all", (0, 0), (2, 0)))
    with pytest.raises(WireMismatch, match=r"rank 0 sends .*3, 2.* to rank 1, which expects .*2, 2"):
        awaited.wait()


def test_a_silent_rank_is_lost_when_patience_is_over() -> None:
    channels = LocalChannel.world(2, patience_s=0.05)
    alone = channels[0].start(Message((torch.ones(1),), Collective.SUM))
    letter = channels[0].start(Message((torch.zeros(0, 2),), Collective.SHUFFLE, "all", (0, 0), (0, 1)))
    for pending in (alone, letter):
        with pytest.raises(PeerLost, match=r"ranks \[1\] sent nothing"):
            pending.wait()


def test_carry_runs_a_job_to_its_end() -> None:
    def method():
        (a,) = yield Message((torch.ones(2),), Collective.SUM)
        (b,) = yield Message((a + 1,), Collective.GATHER)
        return Outcome(b, None, ExchangeState())

    def silent():
        yield from ()
        return Outcome(torch.zeros(1), None, ExchangeState())

    assert carry(LocalChannel.world(1)[0], method()).mean.tolist() == [[2.0, 2.0]]
    assert carry(LocalChannel.world(1)[0], silent()).mean.tolist() == [0.0]
