"""Which rank the others wait for: the same words on all ranks, and batch fractions that shorten the step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from gossamer.autotune.unequal_ranks import told
from gossamer.comm.channel.local import LocalChannel
from gossamer.data.share import share_rows
from gossamer.spec.plan import MeshSizes, Plan


def said(seconds: Sequence[float], rows: Sequence[int]) -> str:
    """What all ranks say that compute for so long in a step, each on its rows."""
    count = len(rows)
    plan = Plan(
        mesh=MeshSizes(replica=count, pipe=len(seconds) // count),
        batch_fractions=tuple(one / sum(rows) for one in rows),
        rows=tuple(rows),
        microbatches=(1,) * count,
    )
    channels = LocalChannel.world(len(seconds), patience_s=60.0)
    with ThreadPoolExecutor(len(seconds)) as pool:
        found = list(pool.map(lambda channel: told(channel, plan, seconds[channel.rank]), channels))
    assert len(set(found)) == 1, "all ranks say the same"
    return found[0]


def test_a_rank_five_times_slower_is_named_with_fractions_that_help() -> None:
    line = said([0.2, 1.0], [4, 4])
    assert line.startswith("rank 1 computes 1 s in a step, rank 0 only 200 ms, and waits for the other")
    assert line.endswith("with plan.batch_fractions=[7, 1] a step would compute 350 ms"), "7 rows of 50 ms, 1 of 250"


def test_fractions_that_were_given_count() -> None:
    """Six rows in 0.6 s, two in 0.6: nobody waits. A rank that got too many is named, though it is the fastest."""
    assert said([0.6, 0.6], [6, 2]) == ""
    line = said([0.6, 0.1], [7, 1])
    assert line.startswith("rank 0 computes 600 ms") and line.endswith("=[4, 4] a step would compute 400 ms")


@pytest.mark.parametrize("seconds", [[1.0, 1.0], [1.4, 1.0], [1.0]])
def test_ranks_that_are_alike_say_nothing(seconds: list[float]) -> None:
    assert said(seconds, [4] * len(seconds)) == ""


def test_where_no_fraction_helps_none_is_named() -> None:
    """Of two sequences each rank computes one, however slow."""
    assert said([0.1, 1.0], [1, 1]) == "rank 1 computes 1 s in a step, rank 0 only 100 ms, and waits for the other"


def test_stages_have_no_fractions() -> None:
    line = said([1.0, 0.1], [8])
    assert line.startswith("rank 0 computes 1 s in a step") and "batch_fractions" not in line


def test_fractions_as_told_give_the_rows_that_were_meant() -> None:
    assert share_rows(8, [7, 1]) == (7, 1) and share_rows(31, [20, 8, 3]) == (20, 8, 3)
