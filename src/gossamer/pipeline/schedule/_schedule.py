"""A pipeline schedule as a value, and its printed grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gossamer.spec.action import Action

WIDTH = 110  # columns of print
MARGIN = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule: one list of actions per rank, in the order they are done, and the rank of each stage.

    `trains`: every F has its backward, and every stage its REDUCE_GRADS; else there are forwards only.
    `dealt`: the rank of each micro-batch, where stages are on several ranks each; actions about a whole stage are then
    in the lists of all its ranks. `placement` names the first of them.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]  # placement[stage] = rank
    microbatches: int
    trains: bool = True
    dealt: tuple[tuple[int, ...], ...] = ()  # dealt[stage][batch] = rank; empty: placement says it

    @property
    def stages(self) -> int:
        return len(self.placement)

    def rank_of(self, stage: int, batch: int) -> int:
        """Return the rank that runs the micro-batch on the stage."""
        return self.dealt[stage][batch] if self.dealt else self.placement[stage]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return all ranks of the stage, ascending."""
        return tuple(sorted(set(self.dealt[stage]))) if self.dealt else (self.placement[stage],)

    def crosses(self, stage: int, batch: int) -> bool:
        """Return whether the micro-batch changes its rank after the stage."""
        behind = 0 <= stage < self.stages - 1
        return behind and self.rank_of(stage, batch) != self.rank_of(stage + 1, batch)

    def batches_of(self, rank: int) -> frozenset[int]:
        """Return the micro-batches that `rank` runs on any of its stages."""
        return frozenset(action.batch for action in self.ranks[rank] if action.batch >= 0)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (rank, index in its list, action), rank by rank."""
        for rank, row in enumerate(self.ranks):
            for place, action in enumerate(row):
                yield rank, place, action

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.stages} stages, {self.microbatches} micro-batches", *grid(self.ranks)])


def grid(rows: Sequence[Sequence[Action]], *, at: tuple[int, int] | None = None) -> list[str]:
    """Return the printed lines of a schedule: a row per rank, a column per index in its list, wrapped to blocks.

    With `at` = (rank, index): only the block that holds it, and an arrow below it.
    """
    cell = 1 + max((len(str(a)) for row in rows for a in row), default=2)
    per_block = (WIDTH - MARGIN) // cell
    longest = max((len(row) for row in rows), default=0)
    starts = range(0, longest, per_block) if at is None else [at[1] // per_block * per_block]
    lines: list[str] = []
    for start in starts:
        for rank, row in enumerate(rows):
            cells = "".join(f"{action!s:<{cell}}" for action in row[start : start + per_block])
            lines.append(f"rank {rank:<{MARGIN - 5}}{cells}".rstrip())
            if at is not None and at[0] == rank:
                lines.append(" " * (MARGIN + (at[1] - start) * cell) + f"^ place {at[1]}")
    return lines
