"""Latency and bandwidth per process group (all, island, between), and per rank for ranks much faster than the slowest.

A link probe measures them. Pairs of ranks have no entries, so the size stays linear in the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from gossamer.spec.units import show_rate

NOISY_SPREAD = 0.25  # readings of one link that differ by more are repeated, and messages say so


def _seconds(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"wanted a finite latency of 0 s or more, got {value:g} s: measure the link again")
    return value


def _rate(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"wanted a finite bandwidth above 0 bytes/s, got {value:g} bytes/s: measure the link again")
    return value


def _rate_or_none(value: float) -> float:
    return _rate(value) if value else value


def _fraction(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"wanted a finite spread of 0 or more, got {value:g}: measure the link again")
    return value


class Link(BaseModel):
    """One direction of a link between ranks: its latency and bandwidth for payload while all ranks send.

    `hop_s`: of small messages that ranks send each other at the same time, as in each hop of an exchange. Over gloo it
    is twice the latency, as a rank sends only what its peer has asked for. `alone_bytes_per_s`: of a rank while the
    others of its island send nothing, more than `bytes_per_s` where they share the way out of the island;
    `ring_bytes_per_s`: while each sends to the next one only, more than `bytes_per_s` where ranks share a host's way
    out, which most of the ring never takes. 0: not measured. Every number is finite, the bandwidth above 0; others
    raise pydantic's ValidationError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    latency_s: Annotated[float, AfterValidator(_seconds)]  # one way, of a small message between two ranks
    bytes_per_s: Annotated[float, AfterValidator(_rate)]  # that one rank can send and receive
    spread: Annotated[float, AfterValidator(_fraction)] = 0.0  # by what fraction the slowest reading took longer
    hop_s: Annotated[float, AfterValidator(_seconds)] = 0.0  # small messages there and back; not given: latency_s
    alone_bytes_per_s: Annotated[float, AfterValidator(_rate_or_none)] = 0.0
    ring_bytes_per_s: Annotated[float, AfterValidator(_rate_or_none)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _hop_of_latency(cls, given: Any) -> Any:
        has_none = isinstance(given, dict) and "hop_s" not in given and "latency_s" in given
        return {**given, "hop_s": given["latency_s"]} if has_none else given

    def seconds(self, nbytes: float, hops: int = 1) -> float:
        """Return the seconds that `nbytes` bytes take in `hops` hops of an exchange, one after the other."""
        return hops * self.hop_s + nbytes / self.bytes_per_s

    def shared_seconds(self, each: Sequence[float]) -> float:
        """Return the seconds in which the ranks of an island, all of them, send these bytes to other islands.

        Where they share the way out, a rank that sends nothing leaves its part of it to the others.
        """
        alone = max(self.bytes_per_s, self.alone_bytes_per_s)
        return max(max(each) / alone, sum(each) / (len(each) * self.bytes_per_s))

    def show(self) -> str:
        """Return the link as text: "100 Mbit/s, 1.2 ms"; with the spread of its readings if that is large."""
        differ = f" (readings differ by {100 * self.spread:.0f}%)" if self.spread > NOISY_SPREAD else ""
        return f"{show_rate(self.bytes_per_s)}{differ}, {1e3 * self.latency_s:.1f} ms"


NO_NETWORK = Link(latency_s=0.0, bytes_per_s=1e12)  # between ranks that send over none


class Network(BaseModel):
    """The link of each level of process groups, and the islands of the ranks.

    `levels` holds "all" (all ranks exchange with all). With more than one island it also holds "island" (all islands at
    once, each inside itself) and "between" (one rank of every island with its counterparts, all at once). Latencies are
    medians over pairs of ranks: neighbors among all ranks, pairs inside islands, pairs of two islands; that of "all" is
    no shorter than that of "between". `uplinks`, `downlinks`: the links of ranks that are much faster than the slowest
    rank, by rank; the "all" link is that of the slowest rank.
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
