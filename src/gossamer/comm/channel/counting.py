"""The counting channel, through which the planner sends its messages: it counts bytes and sends nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import Collective, Message, ProcessGroups, Traffic
from gossamer.comm.meter import Meter


class _Nothing(Pending):
    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self._parts = parts

    def wait(self) -> tuple[Tensor, ...]:
        return self._parts


class CountingChannel(Channel):
    """A channel that sends nothing. Replies have the right shapes and no storage (device "meta")."""

    def __init__(self, rank: int, levels: ProcessGroups) -> None:
        self.rank, self.levels, self.meter = rank, levels, Meter(rank)

    def start(self, message: Message) -> Pending:
        group = self.levels.group(message.level, self.rank)
        self.meter.count(message, group)
        parts = tuple(p.to("meta") for p in message.parts)
        if message.combine is Collective.GATHER:
            parts = tuple(torch.empty((len(group), *p.shape), dtype=p.dtype, device="meta") for p in parts)
        if message.arriving is not None:
            rows = sum(message.arriving)
            parts = tuple(torch.empty((rows, *p.shape[1:]), dtype=p.dtype, device="meta") for p in parts)
        return _Nothing(parts)

    def charge(self, traffic: Iterable[Traffic]) -> None:
        """Count the bytes of messages that a method declares (`traffic`), before anything is encoded or sent."""
        for one in traffic:
            self.start(one.message()).wait()

    def close(self) -> None:
        return
