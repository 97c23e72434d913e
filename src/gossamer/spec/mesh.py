"""The mesh of a run: its ranks by named axes, and the groups of ranks along each axis.

Ranks are numbered replica by replica, and within a replica as its stages list them. A model that is not divided is one
stage, and ranks whose links are all alike are on no islands: neither is a case of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

from gossamer.spec.errors import BadInput

Group: TypeAlias = tuple[int, ...]
Groups: TypeAlias = tuple[Group, ...]
Axis: TypeAlias = Literal["replica", "pipe", "island", "between"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks of a run: so many replicas of the model, each on the ranks of its pipeline stages.

    `stages`: the ranks of every stage within a replica, from 0 on; every rank is in one of them. `islands`: the ranks
    behind one fast link each, where that is known. Groups of an axis:

    replica  the ranks that hold the same stage, whose gradients are one mean
    pipe     the ranks of one replica
    island   the ranks behind one fast link
    between  one rank of every island: those that are the k-th of theirs. A rank without a counterpart on every island
             is alone.
    """

    replicas: int = 1
    stages: Groups = ((0,),)
    islands: Groups = ()

    @staticmethod
    def of_islands(islands: Sequence[Sequence[int]]) -> Mesh:
        """Return the mesh of whole models on these islands, which name every rank once."""
        return Mesh(replicas=sum(map(len, islands)), islands=tuple(map(tuple, islands)))

    @property
    def width(self) -> int:
        """The number of ranks that hold one replica."""
        return sum(map(len, self.stages))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.replicas * self.width

    @property
    def everyone(self) -> Group:
        """All ranks, ascending."""
        return tuple(range(self.size))

    @property
    def in_stages(self) -> bool:
        """Return whether ranks hold different parts of the model: no group of replicas has all of them."""
        return self.everyone not in self.groups("replica")

    @property
    def is_replicated(self) -> bool:
        """Return whether a part of the model is on several ranks, which average its gradients."""
        return any(len(group) > 1 for group in self.groups("replica"))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which this mesh has groups."""
        return ("replica", "pipe", "island", "between") if self.islands else ("replica", "pipe")

    def place(self, rank: int) -> tuple[int, int]:
        """Return (replica, rank within the replica) of `rank`."""
        return divmod(rank, self.width)

    def rank(self, replica: int, place: int) -> int:
        """Return the rank at a place within a replica."""
        return replica * self.width + place

    def of_replica(self, replica: int, places: Groups) -> Groups:
        """Return groups of ranks within a replica as ranks of the run."""
        return tuple(tuple(self.rank(replica, place) for place in group) for group in places)

    def pairs(self, stage: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of ranks on both sides of the boundary between `stage` and the next, of all replicas."""
        for replica in range(self.replicas):
            yield from product(*self.of_replica(replica, self.stages[stage : stage + 2]))

    def groups(self, axis: Axis) -> Groups:
        """Return the groups of ranks along `axis`, each ascending. Raise BadInput where there is no such axis."""
        if axis == "replica":
            every = [self.of_replica(replica, self.stages) for replica in range(self.replicas)]
            return tuple(tuple(sorted(r for ranks in same for r in ranks)) for same in zip(*every, strict=True))
        if axis == "pipe":
            return tuple(self.everyone[self.width * r : self.width * (r + 1)] for r in range(self.replicas))
        if axis not in self.axes:
            raise BadInput(
                f"the ranks have no mesh axis {axis!r}, the axes are {', '.join(self.axes)}: list the ranks of each "
                "island in machines.islands, or choose methods without islands"
            )
        inside = tuple(tuple(sorted(island)) for island in self.islands)
        return inside if axis == "island" else _across(inside)

    def group(self, axis: Axis, rank: int) -> Group:
        """Return the ranks of the group of `rank` along `axis`, itself included.

        Raise BadInput where there is no such axis, or no such rank.
        """
        found = next((group for group in self.groups(axis) if rank in group), None)
        if found is None:
            raise BadInput(
                f"rank {rank} has no group on the mesh axis {axis!r}, the ranks are 0 to {self.size - 1} and the axes "
                f"{', '.join(self.axes)}: list every rank once in machines.islands"
            )
        return found

    def levels(self) -> dict[str, Groups]:
        """Return the groups of ranks that exchange messages, by level, in the order in which they are created.

        `all`: whose gradients are averaged. Where the model is in stages also `pipe`, and `world`, every rank; else
        where there are islands `island` and `between`.
        """
        found = {"all": self.groups("replica")}
        if self.in_stages:
            return {**found, "pipe": self.groups("pipe"), "world": (self.everyone,)}
        return {**found, **{axis: self.groups(axis) for axis in self.axes if axis in ("island", "between")}}


def _across(islands: Groups) -> Groups:
    """Return the k-th ranks of all islands, for every k that the smallest island has, and each other rank alone."""
    counted = min(map(len, islands))
    across = tuple(tuple(sorted(island[k] for island in islands)) for k in range(counted))
    return across + tuple((rank,) for island in islands for rank in island[counted:])
