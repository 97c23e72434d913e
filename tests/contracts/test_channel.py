"""What every channel must do: combine as `Combine` says, count what it sends, and agree with the others."""

from __future__ import annotations

import pytest
import torch

from gossamer.spec.errors import WireMismatch
from gossamer.wire.channel.lockstep import Lockstep
from gossamer.wire.channel.priced import Priced
from gossamer.wire.message import Combine, Levels, Message, Traffic
from gossamer.wire.meter import ring_chunks, sent_bytes


def lockstep_replies(ranks: int) -> list[dict]:
    channels = Lockstep.world(ranks)
    rows = 6 % ranks == 0
    sent = [torch.arange(6.0).view(ranks, -1) * 10**r if rows else torch.ones(ranks, 2) for r in range(ranks)]
    found: list[dict] = [{} for _ in range(ranks)]
    for how in Combine:
        parts = [x.int() if how is Combine.OR else x.clone() for x in sent]
        pending = [c.start(Message((x,), how)) for c, x in zip(channels, parts, strict=True)]
        for rank, one in enumerate(pending):
            found[rank][how.value] = one.wait()[0].tolist()
    for rank, channel in enumerate(channels):
        found[rank]["bytes"] = channel.meter.snapshot()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_group_and_lockstep_agree_bit_for_bit(pool, ranks: int) -> None:
    """Sums here are of whole numbers, so the backend's order of summing cannot show."""
    assert pool.run("wire.jobs:combine_all", ranks) == lockstep_replies(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("how", list(Combine))
def test_priced_counts_what_lockstep_counts(ranks: int, how: Combine) -> None:
    traffic = Traffic(how, ranks * 7, 4)
    channels = Lockstep.world(ranks)
    for channel in channels:
        channel.start(Message((torch.zeros(ranks, 7, dtype=torch.int32 if how is Combine.OR else torch.float32),), how))
    for channel in channels:
        priced = Priced(channel.rank, channel.levels)
        priced.charge([traffic])
        assert priced.meter.snapshot() == channel.meter.snapshot()


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("elements", [0, 1, 5, 1000, 10**6 + 3])
def test_a_ring_moves_twice_n_minus_one_times_the_bytes(ranks: int, elements: int) -> None:
    group = tuple(range(ranks))
    total = sum(sum(sent_bytes(Combine.SUM, 4 * elements, 4, group, r).values()) for r in group)
    assert total == 2 * (ranks - 1) * 4 * elements
    if elements:
        assert sum(ring_chunks(4 * elements, 4, ranks)) == 4 * elements


def test_bits_are_combined_and_not_added() -> None:
    channels = Lockstep.world(3)
    pending = [c.start(Message((torch.tensor([1 << c.rank, 6, 128], dtype=torch.uint8),), Combine.OR)) for c in channels]
    assert [p.wait()[0].tolist() for p in pending] == [[7, 6, 128]] * 3


def test_levels_keep_groups_apart() -> None:
    levels = Levels({"all": ((0, 1, 2, 3),), "island": ((0, 1), (2, 3))})
    channels = Lockstep.world(4, levels)
    pending = [c.start(Message((torch.tensor([float(c.rank)]),), Combine.SUM, "island")) for c in channels]
    assert [p.wait()[0].item() for p in pending] == [1.0, 1.0, 5.0, 5.0]


def test_ranks_that_disagree_are_named() -> None:
    channels = Lockstep.world(2)
    pending = [c.start(Message((torch.zeros(c.rank + 1),), Combine.SUM)) for c in channels]
    with pytest.raises(WireMismatch, match="rank 1 sent"):
        pending[0].wait()
