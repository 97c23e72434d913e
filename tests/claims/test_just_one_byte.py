"""Just One Byte (arXiv 2306.10015): a trained model is tuned by one byte per rank and step, and one can join by them.

Four ranks, 300 steps, rate 3e-3; a small network trained on Python's source, its last layer (8448 numbers) tuned to
English. Measured: from 2.688 to 2.668, where slopes of all digits end at 2.668 and gradients of the same rate at 2.652.
So the byte costs nothing (0.5 % of what the loss falls by), and four directions in 8448 give 0.54 of the way. Sent to
three others: 147 bytes a step, of which the slopes are 3, for 50832. What is gained in bytes is paid in steps:
gradients could take 300 times the rate, where the estimate's noise is too large from three times on.
"""

from __future__ import annotations

from typing import Any

import pytest

from pool import Pool

RANKS, STEPS, RATE = 4, 300, 3e-3


@pytest.fixture(scope="module")
def found(pool: Pool) -> dict[str, list[dict[str, Any]]]:
    ways = ("gradients", "slopes", "byte")
    return {way: pool.run("claims.byte_jobs:tune", RANKS, way=way, steps=STEPS, rate=RATE) for way in ways}


def fall(found: dict[str, list[dict[str, Any]]], way: str) -> float:
    assert all(one["after"] == found[way][0]["after"] for one in found[way])
    return float(found[way][0]["before"] - found[way][0]["after"])


def test_the_loss_falls_by_a_byte_per_rank_and_step(found: dict[str, list[dict[str, Any]]]) -> None:
    assert fall(found, "byte") > 0.4 * fall(found, "gradients") > 0
    weights_and_votes = 3 * 48
    assert found["byte"][0]["sent"] == [3 + weights_and_votes] * STEPS
    assert found["gradients"][0]["sent"][0] > 300 * (3 + weights_and_votes)


def test_a_byte_is_enough(found: dict[str, list[dict[str, Any]]]) -> None:
    assert fall(found, "byte") == pytest.approx(fall(found, "slopes"), rel=0.1)


def test_who_has_the_bytes_is_where_the_others_are(found: dict[str, list[dict[str, Any]]]) -> None:
    assert all(one["joins"] for one in found["byte"])
