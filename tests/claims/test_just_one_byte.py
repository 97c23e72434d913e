"""placeholder"""

from __future__ import annotations

from typing import Any

import pytest

from pool import Pool

RANKS, STEPS, RATE = 4, 300, 3e-3


@pytest.fixture(scope="module")
def found(pool: Pool) -> dict[str, list[dict[str, Any]]]:
    ways = ("gradients", "slopes", "byte")
    return {way: pool.run("claims.byte_jobs:tune", RANKS, way=way, steps=STEPS, rate=RATE) for way in ways}


def test_x(found):
    for w in found:
        print(w, found[w][0]["before"], found[w][0]["after"], found[w][0]["joins"], found[w][0]["sent"][-1])
