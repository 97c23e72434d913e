"""The division of replicated slices over the ranks of a host that write them."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.store.stateful import SliceCopies, StateSlice


def balanced(shared: Sequence[StateSlice], writer: int, writers: int) -> list[int]:
    """Return the indices of the slices that `writer` writes, so that all write about as many bytes; the same on every
    rank.

    Buffers, which each replica computes from its own batches, are all written by the first writer, because the mean of
    one replica and the variance of another do not belong together.
    """
    together = [one.copies is SliceCopies.PER_REPLICA for one in shared]
    loads = [sum(one.tensor.nbytes for one, kept in zip(shared, together, strict=True) if kept), *[0] * (writers - 1)]
    mine = [i for i, kept in enumerate(together) if kept and not writer]
    largest_first = sorted(range(len(shared)), key=lambda i: (-shared[i].tensor.nbytes, i))
    for index in (i for i in largest_first if not together[i]):
        least = loads.index(min(loads))
        loads[least] += shared[index].tensor.nbytes
        if least == writer:
            mine.append(index)
    return sorted(mine)
