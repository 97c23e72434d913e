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


def test_a_rank_that_leaves_between_passes_is_named(pool: Pool) -> None:
    """The others wait for its order of the next one, in a store that waits for minutes by itself."""
    first, second = pool.run("own_loop.late_jobs:leaving", 2, timeout_s=4.0)
    assert first["said"] == ""
    assert "rank 1 waits in pass 2 over the loader: rank 0 " in second["said"]
    assert "Every rank must begin the same passes over a shuffled loader" in second["said"]
    assert second["seconds"] < 60


def test_ranks_that_are_seeded_apart_stay_so_where_the_loader_has_a_generator(pool: Pool) -> None:
    alike, apart = (pool.run("own_loop.late_jobs:noise", 2, own=own) for own in (False, True))
    assert alike[0] == alike[1]
    assert apart[0][0] != apart[1][0] and apart[0][1] != apart[1][1]
