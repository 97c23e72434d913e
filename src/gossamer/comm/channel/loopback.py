"""The loopback channel: it replies at once, as if every rank had sent the same message.

It measures what a method costs besides the network.
"""

from __future__ import annotations

from torch import Tensor

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import Collective, Message, ProcessGroups
from gossamer.comm.meter import Meter


class _There(Pending):
    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self._parts = parts

    def wait(self) -> tuple[Tensor, ...]:
        return self._parts


class LoopbackChannel(Channel):
    """A channel of one rank without peers. Sums are this rank's own parts; parts of other ranks have its values."""

    def __init__(self, rank: int, levels: ProcessGroups) -> None:
        self.rank, self.levels, self.meter = rank, levels, Meter(rank)

    def start(self, message: Message) -> Pending:
        group = self.levels.group(message.level, self.rank)
        self.meter.count(message, group)
        if message.combine is Collective.GATHER:
            return _There(tuple(p.expand(len(group), *p.shape).contiguous() for p in message.parts))
        if message.arriving is not None:
            return _There(tuple(_cycled(p, sum(message.arriving)) for p in message.parts))
        return _There(message.parts)

    def close(self) -> None:
        return


def _cycled(part: Tensor, rows: int) -> Tensor:
    """`rows` rows of `part`, again and again; zeros where it has none."""
    if not part.shape[0]:
        return part.new_zeros((rows, *part.shape[1:]))
    return part.repeat(-(-rows // part.shape[0]), *([1] * (part.dim() - 1)))[:rows]
