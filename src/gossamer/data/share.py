"""The partition of a step's batch over ranks: which sequences each rank computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gossamer.spec.errors import bad_input


def global_indices(step: int, batch: int) -> range:
    """Return the global indices of the `batch` sequences of step `step` (from 0), equal for any number of ranks."""
    return range(step * batch, (step + 1) * batch)


def share_rows(batch: int, share: Sequence[float]) -> tuple[int, ...]:
    """Return the sequences per rank: `batch` divided in proportion to `share`, by largest remainder, at least one each.

    `share` has any positive scale. Equal remainders go to the lower rank. Raises BadInput when there are more ranks
    than sequences, or a share is not positive.
    """
    for part in share:
        if not (math.isfinite(part) and part > 0):
            raise bad_input(
                wanted="one positive number per rank, its fraction of the batch",
                got=f"{list(share)}",
                do="write a number above 0 for every rank",
                key="plan.batch_fractions",
            )
    if batch < len(share):
        raise bad_input(
            wanted="at least one sequence per rank and step",
            got=f"a batch of {batch} for {len(share)} ranks",
            do=f"set train.batch to {len(share)} or more, or use {batch} ranks",
            key="train.batch",
        )
    total = math.fsum(share)
    exact = [batch * part / total for part in share]
    rows = [max(1, math.floor(quota)) for quota in exact]
    while sum(rows) != batch:
        step = 1 if sum(rows) < batch else -1
        able = [rank for rank, count in enumerate(rows) if step > 0 or count > 1]
        rows[max(able, key=lambda rank: (step * (exact[rank] - rows[rank]), -rank))] += step
    return tuple(rows)


def rows_for(rank: int, share: Sequence[float], batch: int) -> range:
    """Return the indices within a step's batch that rank `rank` computes: contiguous, in rank order."""
    rows = share_rows(batch, share)
    first = sum(rows[:rank])
    return range(first, first + rows[rank])
