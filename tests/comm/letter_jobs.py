"""What pool workers run for the tests of messages between two ranks."""

from __future__ import annotations

from typing import Any

import torch

from comm.jobs import group
from gossamer.comm.channel import Channel
from gossamer.comm.message import Collective, Message
from pool import Seat


def letters(seat: Seat) -> dict[str, Any]:
    """Ranks 0 and 2 write to each other, twice, while rank 1 does nothing; then everybody takes part in a sum."""
    channel = group(seat)
    found = write(seat.rank, channel)
    (total,) = channel.start(Message((torch.ones(1),), Collective.SUM)).wait()
    found["sum"] = total.item()
    channel.close()
    return found


def write(rank: int, channel: Channel) -> dict[str, Any]:
    peer = 2 - rank
    if rank == 1:
        return {"got": [], "bytes": channel.meter.snapshot()}
    to = tuple(2 * (r == peer) for r in range(3))
    parts = [torch.full((2, 3), 10.0 * rank + turn) for turn in range(2)]
    under_way = [channel.start(Message((p,), Collective.SHUFFLE, "all", to, to)) for p in parts]
    got = [u.wait()[0].tolist() for u in reversed(under_way)]
    return {"got": got, "bytes": channel.meter.snapshot()}
