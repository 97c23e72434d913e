"""What parts ranks is told before anything moves in the first steps, and at the next backward pass in later ones."""

from __future__ import annotations

import pytest

from pool import Pool

SAID = {
    "gradients": "gradients differ between ranks at optimizer.step() {}",
    "settings": "settings differ between ranks at step {}",
    "parameters": "parameters differ between ranks before step {}",
    "buffers": "buffers differ between ranks before step {}",
}


@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize(("at", "moved"), [(3, False), (16, False), (24, True)])
def test_ranks_that_part_are_told(pool: Pool, what: str, at: int, moved: bool) -> None:
    for found in pool.run("own_loop.late_jobs:parted", 2, what=what, at=at):
        assert SAID[what].format(at + 1) in found["said"]
        assert found["done"] == at + moved


@pytest.mark.parametrize("what", SAID)
def test_what_stays_apart_is_told_within_eight_steps(pool: Pool, what: str) -> None:
    for found in pool.run("own_loop.late_jobs:parted", 2, what=what, at=21):
        if what == "buffers":
            assert SAID[what].format(25) in found["said"]
        elif what in ("gradients", "settings"):
            assert SAID[what].format(22) in found["said"]
        else:
            assert "differ between ranks" in found["said"]
        assert 22 <= found["done"] <= 25
