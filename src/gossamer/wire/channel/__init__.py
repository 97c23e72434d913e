"""Channels: what carries a message. The same method runs over each of them.

`Group` is a process group (truth), `Lockstep` is several ranks in one process without threads (meaning), `Priced`
carries nothing and only counts (planning). Each one meters the bytes it sends, per link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gossamer.wire.message import Levels, Message
from gossamer.wire.meter import Meter


class Pending(ABC):
    """A message under way."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Block until it has been combined; the parts, as `Combine` says. Raises PeerLost or WireMismatch."""


class Channel(ABC):
    """One rank's end of the wire. Messages of a group must be started in the same order on all its ranks."""

    rank: int
    levels: Levels
    meter: Meter

    @abstractmethod
    def start(self, message: Message) -> Pending:
        """Hand a message over; it is counted when it is started."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds. Starting a message on a closed channel is an error."""
