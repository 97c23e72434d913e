"""Partition of the rows of parameters over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ProcessGroups
from gossamer.spec.mesh import Group

RowPart = tuple[tuple[int, int], ...]  # (start, numel) in a flat buffer of the rows of one rank, entry by entry


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of rows [start, start + count) of a tensor's first dimension; a 0-dim tensor is one row."""

    start: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of these rows; a 0-dim tensor itself."""
        return tensor if tensor.dim() == 0 else tensor[self.start : self.start + self.count]

    def within(self, other: RowRange) -> RowRange:
        """Return the same rows, counted from the first row of `other`, which contains them."""
        return RowRange(self.start - other.start, self.count)


def rows_of(name: str, shape: Sequence[int], ranks: int, *, whole: bool = False) -> tuple[RowRange, ...]:
    """Return the rows of a parameter by rank, as equal as possible.

    With fewer rows than ranks, and of `whole` parameters, one rank has all of them. The name decides which one, and
    which ranks have one row more where counts cannot be equal; over many parameters that evens out.
    """
    count = shape[0] if shape else 1
    first = zlib.crc32(name.encode()) % ranks
    if whole or count < ranks:
        return tuple(RowRange(0, count if rank == first else 0) for rank in range(ranks))
    each, more = divmod(count, ranks)
    sizes = [each + ((rank - first) % ranks < more) for rank in range(ranks)]
    return tuple(RowRange(sum(sizes[:rank]), size) for rank, size in enumerate(sizes))


@dataclass(frozen=True, slots=True)
class RowPartition:
    """The partition of parameter rows over ranks, along the levels of `path`; empty: every rank has all rows.

    Each level divides the rows of the level before: among the ranks of an island, say, and then each rank's rows among
    it and its counterparts on the other islands. On every island as many ranks get rows as the smallest has: those with
    a counterpart on all islands.

    `kept`: along how many levels, from the first, parameters stay sharded. Updated rows are gathered along the others.
    `gives_back`: whether a rank keeps only its rows of the gradients too. `whole`: whether one rank has all rows of a
    parameter, for optimizers that need it as it is.
    """

    levels: ProcessGroups
    path: tuple[str, ...] = ()
    kept: int = 0
    gives_back: bool = False
    whole: bool = False

    @property
    def back(self) -> tuple[str, ...]:
        """Return the levels along which updated rows are gathered, in path order; gathering starts with the last."""
        return self.path[self.kept :]

    @property
    def of_parameters(self) -> RowPartition:
        """Return the partition of the parameters themselves, which are gathered along all its levels for use."""
        return RowPartition(self.levels, self.path[: self.kept], whole=self.whole)

    def rows(self, name: str, shape: Sequence[int], rank: int) -> RowRange:
        """Return the rows of a parameter that `rank` has."""
        mine = RowRange(0, shape[0] if shape else 1)
        for level in self.path:
            owners = self.owners(level, rank)
            if rank not in owners:
                return RowRange(0, 0)
            inner = rows_of(name, (mine.count,), len(owners), whole=self.whole)[owners.index(rank)]
            mine = RowRange(mine.start + inner.start, inner.count)
        return mine

    def part(self, layout: Layout, rank: int) -> RowPart:
        """Return the ranges of a rank's rows in a bucket."""
        rows = ((e, self.rows(e.name, e.shape, rank), prod(e.shape[1:])) for e in layout.entries)
        return tuple((e.start + r.start * row, r.count * row) for e, r, row in rows if r.count * row)

    def owners(self, level: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of `rank` among whom rows are divided."""
        return self.levels.owners(rank) if level == "island" else self.levels.group(level, rank)

    def givers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose rows are gathered to `rank`, which have each row once, in the order of the message."""
        return self._along(self.back, rank)

    def _along(self, path: Sequence[str], rank: int) -> tuple[int, ...]:
        found: tuple[int, ...] = (rank,)
        for level in path:
            found = tuple(peer for one in found for peer in self.owners(level, one))
        return found

    def is_first(self, rank: int) -> bool:
        """Return whether `rank` has rows that no rank before it has."""
        return rank in self._along(self.path, self.levels.group("all", rank)[0])

    def copies(self, rank: int) -> Group:
        """Return the ranks that have the same rows as `rank`, the first one in front; none where it has no rows."""
        if any(rank not in self.owners(level, rank) for level in self.path):
            return ()
        everyone = self.levels.group("all", rank)
        if not self.path:
            return everyone
        across = self.levels.group("between", rank) if self.path == ("island",) else (rank,)
        firsts = self._along(self.path, everyone[0])
        return tuple(sorted(across, key=lambda one: one not in firsts))


def path_of(level: str, levels: ProcessGroups) -> tuple[str, ...]:
    """Return the levels along which rows are sharded: over `all` ranks, or over each `island` where there are any."""
    islands = levels.groups.get("island", ())
    if level == "island" and islands:
        return ("island",)
    has_two_hops = any(len(island) > 1 for island in islands) and levels.has_several("island")
    return ("island", "between") if has_two_hops else ("all",)
