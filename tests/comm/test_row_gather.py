"""Rows of all ranks: the same on each, in as few hops as told, with the bytes that are declared."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gossamer.comm.channel import carry
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.message import ProcessGroups
from gossamer.comm.row_gather import gather_hops, gather_rounds, gather_rows, row_traffic

FLAT = [(ProcessGroups.flat(n), "all") for n in (1, 2, 3, 5, 8, 13)]
ISLANDS = ProcessGroups.islands([(0, 1, 2), (3, 4), (5, 6)])
LEVELS = [*FLAT, (ISLANDS, "all"), (ISLANDS, "island"), (ProcessGroups.islands([(0,), (1,), (2,)]), "all")]


@pytest.mark.parametrize(("levels", "level"), LEVELS, ids=lambda one: str(len(getattr(one, "everyone", one))))
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_every_rank_has_the_rows_of_all(levels: ProcessGroups, level: str, shape: tuple[int, ...]) -> None:
    channels = LocalChannel.world(len(levels.everyone), levels, patience_s=60.0)

    def one(channel: LocalChannel) -> torch.Tensor:
        mine = torch.full(shape, float(channel.rank), dtype=torch.float64)
        return carry(channel, gather_rows(mine, levels, level, channel.rank)).mean

    with ThreadPoolExecutor(len(channels)) as pool:
        found = list(pool.map(one, channels))
    for channel, rows in zip(channels, found, strict=True):
        group = levels.group(level, channel.rank)
        expected = torch.tensor(group, dtype=torch.float64).view(-1, *[1] * len(shape)).expand(len(group), *shape)
        assert torch.equal(rows, expected)
        assert channel.meter.messages == gather_rounds(levels, level, channel.rank)
        counting = CountingChannel(channel.rank, levels)
        counting.charge(row_traffic(max(1, torch.Size(shape).numel()), 8, levels, level, channel.rank))
        assert counting.meter.snapshot() == channel.meter.snapshot()


def test_hops_are_those_of_the_longest_wait() -> None:
    assert [gather_hops(levels, level, 0) for levels, level in FLAT] == [(h, 0) for h in (0, 1, 2, 3, 3, 4)]
    assert gather_hops(ISLANDS, "all", 0) == (3, 3), "a ring over three islands"
    assert gather_hops(ISLANDS, "island", 0) == (2, 0)


def test_rows_leave_an_island_once() -> None:
    """Over a ring one rank of eight sends to the other island; in few hops many would send the same rows again."""
    islands = [tuple(range(8)), tuple(range(8, 16))]

    def leaving(levels: ProcessGroups) -> int:
        found = Counter[str]()
        for rank in range(16):
            channel = CountingChannel(rank, levels)
            channel.charge(row_traffic(1, 8, levels, "all", rank))
            found.update(channel.meter.snapshot())
        return sum(sent for link, sent in found.items() if int(link.split(">")[0]) < 8 <= int(link.split(">")[1]))

    assert leaving(ProcessGroups.islands(islands)) == 8 * 15
    assert leaving(ProcessGroups.flat(16)) > 5 * 8 * 15
