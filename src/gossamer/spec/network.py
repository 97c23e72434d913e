"""What is known of the links between ranks: measured by a probe, used by every planner. Never one entry per pair."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0)]
LinkRate = Annotated[float, Field(gt=0)]


class Link(BaseModel):
    """One direction of a way between ranks, as payload sees it while all ranks send."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    latency_s: Seconds  # of a small message
    bytes_per_s: LinkRate  # that one rank can send

    def seconds(self, nbytes: float, hops: int = 1) -> float:
        """How long `nbytes` take over `hops` messages, one after the other."""
        return hops * self.latency_s + nbytes / self.bytes_per_s


class Network(BaseModel):
    """The link of every level, and which ranks are near each other.

    `levels` holds "all" (all ranks exchange with all), and where `islands` are more than one: "island" (inside all of
    them at once) and "between" (one rank of every island with its counterparts, all at once). `uplinks`, `downlinks`:
    the ways out and in of ranks that are much faster than the slowest one, whose the level's "all" link is.
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
