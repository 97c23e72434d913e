"""Who is lost, where no supervisor finds out: the ranks that still run tell each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from gossamer.comm.absent_ranks import who_is_lost

GROUP = (0, 1, 2)


def told(asking: tuple[int, ...], within_s: float = 1.5) -> list[str]:
    """What the ranks `asking`, of three, are told; the others never ask."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(asking)) as threads:
        return list(threads.map(lambda rank: who_is_lost(store, rank, GROUP, within_s=within_s), asking))


@pytest.mark.parametrize("lost", GROUP)
def test_those_that_run_name_the_one_that_does_not(lost: int) -> None:
    for said in told(tuple(rank for rank in GROUP if rank != lost)):
        assert said.startswith(f"rank {lost} is lost: ")


def test_where_all_report_none_is_named() -> None:
    for said in told(GROUP, within_s=5.0):
        assert said.startswith("all of these ranks still run: look at the network")


def test_a_rank_that_nobody_joins_may_be_the_lost_one() -> None:
    (said,) = told((2,))
    assert said.startswith("none of the other ranks reports the same") and "this rank may be cut off" in said


def test_of_two_the_other_one_is_lost() -> None:
    assert who_is_lost(dist.HashStore(), 1, (0, 1), within_s=0.1).startswith("rank 0 is lost: ")


def test_a_store_that_never_answers_is_not_waited_for() -> None:
    is_over = threading.Event()

    class Silent:
        def set(self, key: str, value: str) -> None:
            is_over.wait(30.0)
            raise RuntimeError("Connection was closed")

    silent: Any = Silent()
    try:
        assert "the store on rank 0 cannot be reached either" in who_is_lost(silent, 1, GROUP, within_s=0.1)
        assert not is_over.is_set()
    finally:
        is_over.set()


def test_what_was_found_holds_when_rank_0_ends_meanwhile() -> None:
    class Ending:
        looks = 0

        def set(self, key: str, value: str) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            self.looks += 1
            if self.looks > 2:
                raise RuntimeError("Connection was closed")
            return keys == ["lost a peer/0"]

    ending: Any = Ending()
    assert who_is_lost(ending, 2, GROUP, within_s=5.0).startswith("rank 1 is lost: ")
