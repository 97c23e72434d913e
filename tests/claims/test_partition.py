"""The 3-level partition (Xu et al., arXiv 2501.04266): weights on each island, gradients and states over all ranks.

What the slow line carries in a step does not grow with the gathers: of d numbers on m islands of k ranks each rank puts
4 (m-1)/m d/k bytes of gradients and as many of updated weights on it, however many units and micro-batches there are.
Over all ranks (ZeRO-3) every gather crosses it too. Two islands of two ranks, six units in a row, the same losses to
1e-5: 0.43 of the bytes over the slow line with one micro-batch in a step, 0.18 with four, both to the byte what the
formulas say. The paper's own gains are of throughput (1.71 times that of ZeRO++ on 384 GCDs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pool import Pool

ISLANDS = [[0, 1], [2, 3]]
VOTES = 2 * 3 * 48  # bytes of the ranks' agreement on a step, in a ring which crosses twice
PARTITION: Any = {"zero3": {"weights_group": "island"}}


def crossing(ran: Sequence[dict[str, Any]]) -> int:
    """Bytes between islands, of all ranks, without the agreement."""
    far = {f"{a}>{b}" for i in ISLANDS for j in ISLANDS if i is not j for a in i for b in j}
    return sum(n for one in ran for link, n in one["sent"].items() if link in far) - VOTES


def of_gathers(sizes: Sequence[int], microbatches: int) -> int:
    """Numbers of a step's unit gathers, forth and back, but for the two that are there when the direction turns."""
    return sum(sizes[:2]) + microbatches * (sum(sizes[2:]) + sum(sizes[:-2]))


@pytest.mark.parametrize(("microbatches", "ratio"), [(1, 0.4345), (4, 0.1782)])
def test_the_slow_line_carries_no_gather(pool: Pool, microbatches: int, ratio: float) -> None:
    given = {"islands": ISLANDS, "microbatches": microbatches}
    plain, flat, ours = (
        pool.run("claims.partition_jobs:learn", 4, states=s, **given) for s in ("none", "zero3", PARTITION)
    )
    for found in (flat, ours):
        assert [one["losses"] for one in found] == [pytest.approx(one["losses"], rel=1e-5) for one in plain]
    sizes, k, m = ours[0]["sizes"], 2, 2
    n, d = k * m, sum(sizes)
    assert crossing(ours) == n * 2 * 4 * (m - 1) / m * d / k
    rings = m * 4 * (n - 1) / n * of_gathers(sizes, microbatches)  # each crosses once for every island
    assert crossing(flat) == n * 4 * (m - 1) / m * d + rings
    assert crossing(ours) / crossing(flat) == pytest.approx(ratio, rel=1e-3)
