"""Whose rows of a parameter are whose."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ProcessGroups

RowPart = tuple[tuple[int, int], ...]  # (start, numel) in a flat buffer of the rows of one rank, entry by entry


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, start + count) of a tensor's first dimension; a number is one row."""

    start: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of them, with as many dimensions as the tensor has; a number is all there or an error."""
        return tensor if tensor.dim() == 0 else tensor[self.start : self.start + self.count]

    def within(self, other: RowRange) -> RowRange:
        """The same ones, counted from the first of `other`, which they lie in."""
        return RowRange(self.start - other.start, self.count)


def rows_of(name: str, shape: Sequence[int], ranks: int) -> tuple[RowRange, ...]:
    """By rank. Where there are fewer rows than ranks, one rank has all of them: which one depends on the name, and so
    does who has one row more where they cannot be equal; over many parameters that evens out.
    """
    count = shape[0] if shape else 1
    first = zlib.crc32(name.encode()) % ranks
    if count < ranks:
        return tuple(RowRange(0, count if rank == first else 0) for rank in range(ranks))
    each, more = divmod(count, ranks)
    sizes = [each + ((rank - first) % ranks < more) for rank in range(ranks)]
    return tuple(RowRange(sum(sizes[:rank]), size) for rank, size in enumerate(sizes))


@dataclass(frozen=True, slots=True)
class RowPartition:
    """Rows dealt out level by level: among the ranks of an island, say, and what is a rank's there among it and its
    counterparts between islands. Along no path nothing is dealt out: every rank has all rows.

    Of every island as many ranks get rows as the smallest has: those with a counterpart in all islands.
    `kept`: along how many of the levels, the first ones, parameters are dealt out for good. What is updated comes back
    along the others.
    """

    levels: ProcessGroups
    path: tuple[str, ...] = ()
    kept: int = 0

    @property
    def back(self) -> tuple[str, ...]:
        """The levels along which updated rows come back, the last one first."""
        return self.path[self.kept :]

    @property
    def of_parameters(self) -> RowPartition:
        """How they are dealt out for good; all of that comes back while they are needed."""
        return RowPartition(self.levels, self.path[: self.kept])

    def rows(self, name: str, shape: Sequence[int], rank: int) -> RowRange:
        """What `rank` has of a parameter."""
        mine = RowRange(0, shape[0] if shape else 1)
        for level in self.path:
            owners = self.owners(level, rank)
            if rank not in owners:
                return RowRange(0, 0)
            inner = rows_of(name, (mine.count,), len(owners))[owners.index(rank)]
            mine = RowRange(mine.start + inner.start, inner.count)
        return mine

    def part(self, layout: Layout, rank: int) -> RowPart:
        """Where a rank's rows lie in a bucket."""
        rows = ((e, self.rows(e.name, e.shape, rank), prod(e.shape[1:])) for e in layout.entries)
        return tuple((e.start + r.start * row, r.count * row) for e, r, row in rows if r.count * row)

    def owners(self, level: str, rank: int) -> tuple[int, ...]:
        """Those of the group of `rank` among whom rows are dealt out."""
        return self.levels.owners(rank) if level == "island" else self.levels.group(level, rank)

    def givers(self, rank: int) -> tuple[int, ...]:
        """The ranks that together have all rows once that are to come back to `rank`, in the order in which it hears of
        them on the way.
        """
        return self._along(self.back, rank)

    def _along(self, path: Sequence[str], rank: int) -> tuple[int, ...]:
        found: tuple[int, ...] = (rank,)
        for level in path:
            found = tuple(peer for one in found for peer in self.owners(level, one))
        return found

    def is_first(self, rank: int) -> bool:
        """Whether no rank before it has the same rows, where it has any."""
        return rank in self._along(self.path, self.levels.group("all", rank)[0])


def path_of(level: str, levels: ProcessGroups) -> tuple[str, ...]:
    """Along which levels rows are dealt out among all ranks, or those of an island where there are any."""
    islands = levels.groups.get("island", ())
    if level == "island" and islands:
        return ("island",)
    return ("island", "between") if len(islands) > 1 and max(map(len, islands)) > 1 else ("all",)
