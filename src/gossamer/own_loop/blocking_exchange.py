"""Gradient exchanges of one message each, sent by the calling thread.

The communication thread orders messages of several rounds, which wait for each other's replies, at two thread switches
per bucket. If every exchange sends one message, the message order is the bucket order. The thread that has filled a
bucket sends it as soon as those before it are sent. Whoever asks for a result waits for it. The order is the same on
all ranks, in whatever order gradients arrive.
"""

from __future__ import annotations

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import Outcome, Rounds


class BlockingExchange:
    """The bucket exchanges of one backward pass: submitted in any order, sent in the order of their indices."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._given: dict[int, Rounds] = {}
        self._under_way: list[tuple[Rounds, Pending]] = []

    def submit(self, job: int, method: Rounds) -> None:
        """Submit the exchange of bucket `job`; send it, and later ones that waited for it, in turn. Raises PeerLost."""
        self._given[job] = method
        while (turn := len(self._under_way)) in self._given:
            method = self._given.pop(turn)
            self._under_way.append((method, self._channel.start(next(method))))

    def result(self, job: int) -> Outcome:
        """Wait for the exchange of bucket `job` and return its outcome. All buckets up to it must be submitted. Raises
        PeerLost.
        """
        method, pending = self._under_way[job]
        try:
            method.send(pending.wait())
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        raise AssertionError("an exchange that declared one message wants to send more")

    def drop(self) -> None:
        """Abandon all exchanges."""
        for method in (*self._given.values(), *(method for method, _ in self._under_way)):
            method.close()
