"""The measured links as a plan uses them: those between its islands, sizes of buckets, uplinks and downlinks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gossamer.spec.network import Network
from gossamer.spec.plan import BUCKET_BYTES
from gossamer.spec.statistics import Paths

LARGEST_BUCKET_BYTES = 1 << 28  # an exchange may need as much memory again
_BUCKET_BYTES = (1 << 20, 1 << 22, 1 << 24, BUCKET_BYTES)  # and a quarter of the gradients, half of them, and all
_MOST_BUCKETS = 4096


def sizes_of_buckets(params: Mapping[str, Tensor], largest: int) -> tuple[int, ...]:
    """Return the bucket sizes to try for these gradients, ascending, none above `largest` bytes.

    Small buckets overlap better and can have an exchange each; large ones wait for fewer latencies.
    """
    total = max(1, sum(p.numel() * p.element_size() for p in params.values()))
    sizes = {min(size, largest, total) for size in (*_BUCKET_BYTES, -(-total // 4), -(-total // 2), total)}
    return tuple(size for size in sorted(sizes) if total <= size * _MOST_BUCKETS) or (min(largest, total),)


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
