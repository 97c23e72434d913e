"""Assign the micro-batches of a stage to its ranks."""

from __future__ import annotations

from collections.abc import Sequence


def deal(ranks: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the rank of every micro-batch, where `ranks[i]` gets `counts[i]` of them, interleaved evenly.

    So all ranks of a stage get their first micro-batch soon, and none waits until the others have all of theirs.
    """
    turns = sorted(((j + 0.5) / count, i) for i, count in enumerate(counts) for j in range(count))
    return tuple(ranks[i] for _, i in turns)
