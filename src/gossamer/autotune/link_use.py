"""The measured links as a plan uses them: those between its islands, its bucket size, uplinks and downlinks."""

from __future__ import annotations

from gossamer.spec.network import Network
from gossamer.spec.statistics import Paths

_LEAST_BUCKET_BYTES = 1 << 20
_LATENCIES_PER_BUCKET = 40  # of wire time: small enough to overlap, large enough that latency is little of it


def bucket_bytes_for(links: Network, largest: int) -> int:
    """Return the bucket size for these links, at most `largest` bytes.

    Slow links allow small buckets, which overlap better and can have an exchange each.
    """
    link = links.levels.get("between", links.levels["all"])
    wanted = int(_LATENCIES_PER_BUCKET * link.latency_s * link.bytes_per_s)
    return min(largest, max(_LEAST_BUCKET_BYTES, wanted))


def links_of_islands(links: Network, islands: tuple[tuple[int, ...], ...]) -> Network:
    """Return the links for these islands; if other islands were detected, or none, all ranks get the link of level
    `all`.
    """
    if not links.has_islands or {frozenset(i) for i in links.islands} == {frozenset(i) for i in islands}:
        return links
    return links.model_copy(update={"levels": {"all": links.levels["all"]}})


def uplinks_downlinks_of(links: Network) -> Paths:
    """Return every rank's uplink and downlink; the link of level `all` if no other was measured."""
    usual = links.levels["all"]
    ranks = sorted(r for island in links.islands for r in island)
    up, down = (tuple(ways.get(r, usual) for r in ranks) for ways in (links.uplinks, links.downlinks))
    return Paths(up=up, down=down)
