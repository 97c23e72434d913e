"""The hosts of ranks that mpirun started, which tells each rank of its own host alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from gossamer.job.worker import _context
from gossamer.launch.environment import LauncherRank, read_environment
from gossamer.spec.errors import PeerLost


def rank_of(names: str, rank: int) -> LauncherRank:
    """Rank `rank` of as many as `names` has letters, each of which is the name of a host."""
    mine = names[rank]
    variables = {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": len(names),
        "OMPI_COMM_WORLD_LOCAL_RANK": names[:rank].count(mine),
        "OMPI_COMM_WORLD_LOCAL_SIZE": names.count(mine),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    return replace(read_environment({name: str(value) for name, value in variables.items()}), hostname=mine)


@pytest.mark.parametrize(
    ("names", "hosts"),
    [("abbb", [0, 1, 1, 1]), ("abab", [0, 1, 0, 1]), ("bbaa", [0, 0, 1, 1]), ("aaa", [0, 0, 0])],
    ids=["unequal", "in turns", "equal", "one host"],
)
def test_ranks_tell_each_other_where_they_are(names: str, hosts: list[int]) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda rank: _context(rank_of(names, rank), store, 60.0), range(len(names))))
    assert [one.host for one in found] == hosts and {one.hosts for one in found} == {len(set(hosts))}


def test_hosts_of_one_name_are_those_that_the_counts_suggest() -> None:
    store, place = dist.HashStore(), rank_of("abab", 3)
    for rank in range(4):
        store.set(f"hostname/{rank}", "a")
    found = _context(replace(place, hostname="a"), store, 60.0)
    assert (found.host, found.hosts) == (place.host, place.hosts) == (1, 2)


def test_a_rank_that_tells_nothing_is_waited_for_no_longer_than_is_asked() -> None:
    with pytest.raises(PeerLost, match="rank 0 waits for the host names of all 2 ranks"):
        _context(rank_of("ab", 0), dist.HashStore(), 0.1)
