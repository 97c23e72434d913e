"""Exchanges of one message each, without a thread of their own.

The pump orders messages of several rounds, which wait for each other's replies; it costs two changes of thread a
bucket. Where every exchange sends one message, their order is that of the buckets: each goes out in the thread that
has filled it, as soon as those before it are out, and whoever asks for its end waits for it. Equal on all ranks,
whatever order gradients arrive in.
"""

from __future__ import annotations

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import Outcome, Rounds


class BlockingExchange:
    """The exchanges of one backward pass: given by index in any order, sent in the order of the indices."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._given: dict[int, Rounds] = {}
        self._under_way: list[tuple[Rounds, Pending]] = []

    def submit(self, job: int, method: Rounds) -> None:
        """The exchange of bucket `job`; sends it, and those that waited for it. Raises PeerLost."""
        self._given[job] = method
        while (turn := len(self._under_way)) in self._given:
            method = self._given.pop(turn)
            self._under_way.append((method, self._channel.start(next(method))))

    def result(self, job: int) -> Outcome:
        """The end of an exchange, once all before it were given. Raises PeerLost."""
        method, pending = self._under_way[job]
        try:
            method.send(pending.wait())
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        raise AssertionError("an exchange that declared one message wants to send more")

    def drop(self) -> None:
        """Give them up."""
        for method in (*self._given.values(), *(method for method, _ in self._under_way)):
            method.close()
