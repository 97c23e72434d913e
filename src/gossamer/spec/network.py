"""Latency and bandwidth per process group (all, island, between), and per rank for ranks much faster than the slowest.

A link probe measures them. Pairs of ranks have no entries, so the size stays linear in the ranks.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0)]
LinkRate = Annotated[float, Field(gt=0)]


class Link(BaseModel):
    """One direction of a link between ranks: its latency and bandwidth for payload while all ranks send."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    latency_s: Seconds  # of a small message
    bytes_per_s: LinkRate  # that one rank can send

    def seconds(self, nbytes: float, hops: int = 1) -> float:
        """Return the seconds that `nbytes` bytes take in `hops` messages, one after the other."""
        return hops * self.latency_s + nbytes / self.bytes_per_s


class Network(BaseModel):
    """The link of each level of process groups, and the islands of the ranks.

    `levels` holds "all" (all ranks exchange with all). With more than one island it also holds "island" (all islands at
    once, each inside itself) and "between" (one rank of every island with its counterparts, all at once).
    `uplinks`, `downlinks`: the links of ranks that are much faster than the slowest rank, by rank; the "all" link is
    that of the slowest rank.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    islands: tuple[tuple[int, ...], ...]
    levels: dict[str, Link]
    uplinks: dict[int, Link] = {}
    downlinks: dict[int, Link] = {}

    @property
    def ranks(self) -> int:
        return sum(len(island) for island in self.islands)

    @property
    def has_islands(self) -> bool:
        return "between" in self.levels
