"""Count the bytes that a message puts on each link: one model for cost estimates and for meters.

The model is what the backends do, checked against the interface counters of the emulated network (docs/results):
SUM, MAX, OR ring all-reduce (reduce-scatter, then all-gather), everything to the next rank; 2 (n-1)/n of the bytes.
GATHER       ring all-gather, everything to the next rank; (n-1) times the bytes.
SHUFFLE      direct, 1/n of the bytes to every other rank, or as its `splits` say.
"""

from __future__ import annotations

import math
import threading
from collections import Counter

from torch import Tensor

from gossamer.comm.message import Collective, Message, is_late

_SEGMENT_BYTES = 1 << 20  # gloo cuts a ring's chunks into segments of at most this size


def hop_count(combine: Collective, ranks: int) -> int:
    """Return the number of messages between two ranks of a group of `ranks` that wait for one another."""
    return max(1, {Collective.SHUFFLE: 1, Collective.GATHER: ranks - 1}.get(combine, 2 * (ranks - 1)))


def sent_bytes(
    combine: Collective, part_bytes: int, itemsize: int, group: tuple[int, ...], rank: int
) -> dict[int, int]:
    """Return the bytes that `rank` sends to each peer for one part of `part_bytes`; payload only, no headers."""
    ranks, me = len(group), group.index(rank)
    if part_bytes == 0:
        return {}
    if combine is Collective.SHUFFLE:
        return {peer: part_bytes // ranks for peer in group if peer != rank}
    chunks = ring_chunks(part_bytes, itemsize, ranks)
    # A rank sends every chunk but one while reducing, and every chunk but another while gathering.
    reduced = 2 * part_bytes - chunks[(me + 1) % ranks] - chunks[(me + 2) % ranks]
    sent = (ranks - 1) * part_bytes if combine is Collective.GATHER else reduced
    return {peer: sent for peer in (group[(me + 1) % ranks],) if peer != rank}


def ring_chunks(part_bytes: int, itemsize: int, ranks: int) -> tuple[int, ...]:
    """Return the bytes of each rank's chunk in a ring all-reduce of `part_bytes`; they sum to `part_bytes`."""
    per_rank = max(math.ceil(part_bytes / (_SEGMENT_BYTES * ranks)), 2)
    segment = math.ceil(math.ceil(part_bytes / (per_rank * ranks)) / itemsize) * itemsize
    chunk = per_rank * segment
    return tuple(max(0, min(chunk, part_bytes - i * chunk)) for i in range(ranks))


class Meter:
    """A counter of the messages that one rank sends, and of their payload bytes per link ("0>1")."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.links: Counter[str] = Counter()
        self.late: Counter[str] = Counter()  # the part of it sent beside the steps
        self.messages = 0
        self._lock = threading.Lock()  # several communication threads may send over one channel

    def count(self, message: Message, group: tuple[int, ...]) -> None:
        """Count one message that goes to `group`."""
        with self._lock:
            self.messages += 1
            for part in message.parts:
                size = part.numel() * part.element_size()
                for peer, sent in self._sent(message, part, size, group).items():
                    self.links[f"{self.rank}>{peer}"] += sent
                    if is_late(message.level):
                        self.late[f"{self.rank}>{peer}"] += sent

    def _sent(self, message: Message, part: Tensor, size: int, group: tuple[int, ...]) -> dict[int, int]:
        if message.splits is None:
            return sent_bytes(message.combine, size, part.element_size(), group, self.rank)
        row = size // max(1, sum(message.splits))
        return {peer: n * row for peer, n in zip(group, message.splits, strict=True) if peer != self.rank and n}

    @property
    def total_bytes(self) -> int:
        return sum(self.snapshot().values())

    def snapshot(self) -> dict[str, int]:
        """Return a copy of the bytes sent per link."""
        with self._lock:
            return dict(self.links)

    def apart(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes per link sent with the steps, and those sent beside them (late levels)."""
        with self._lock:
            return {link: sent - self.late[link] for link, sent in self.links.items()}, dict(self.late)
