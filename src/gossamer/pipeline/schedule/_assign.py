"""Who of a stage's ranks does which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence


def deal(ranks: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """The rank of every micro-batch where `ranks[i]` does `counts[i]` of them, as evenly mixed as may be: so all ranks
    of a stage have their first soon, and none waits until the others have all of theirs.
    """
    turns = sorted(((j + 0.5) / count, i) for i, count in enumerate(counts) for j in range(count))
    return tuple(ranks[i] for _, i in turns)
