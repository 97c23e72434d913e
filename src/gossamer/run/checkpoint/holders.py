"""The ranks that hold each parameter of a model: all of them, or those of some pipeline stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gossamer.run.staged_model import StagedModel
from gossamer.store.stateful import StateSlice

Division: TypeAlias = tuple[Sequence[StateSlice], int, int]


class ParameterHolders(ABC):
    """The ranks that hold the parameters and buffers of a model, by canonical name."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether this rank holds a parameter or buffer."""

    @property
    @abstractmethod
    def elsewhere(self) -> frozenset[str]:
        """The parameters and buffers that other ranks may hold without this one."""

    @abstractmethod
    def division(self, shared: Sequence[StateSlice], rank: int, writer: int, writers: int) -> Division:
        """Return the slices that this rank divides with other writers, its index among these writers, and their count.

        `shared`: the replicated slices that this rank holds; `writer`/`writers`: its index among the consecutive ranks
        of its host.
        """


@dataclass(frozen=True, slots=True)
class AllRanks(ParameterHolders):
    """The holders of a model that every rank has in full."""

    def has(self, name: str) -> bool:
        return True

    @property
    def elsewhere(self) -> frozenset[str]:
        return frozenset()

    def division(self, shared: Sequence[StateSlice], rank: int, writer: int, writers: int) -> Division:
        return shared, writer, writers


@dataclass(frozen=True, slots=True)
class StageRanks(ParameterHolders):
    """The holders of a model in pipeline stages: the ranks of each stage."""

    cut: StagedModel

    def has(self, name: str) -> bool:
        return name in self.cut.holds

    @property
    def elsewhere(self) -> frozenset[str]:
        return self.cut.names

    def division(self, shared: Sequence[StateSlice], rank: int, writer: int, writers: int) -> Division:
        """Divide among the writers with this rank's stages.

        A tensor of several stages belongs to the first of these stages that has a writer on this host.
        """
        first = rank - writer
        places = [self.cut.stages_at(other % self.cut.ranks) for other in range(first, first + writers)]
        mine = places[writer]
        alike = [i for i, place in enumerate(places) if place == mine]
        here = [one for one in shared if self._leader(one.where.name, places) == mine]
        return here, alike.index(writer), len(alike)

    def _leader(self, name: str, places: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return next(stages for stages in self._stages_with(bare(name)) if stages in places)

    def _stages_with(self, name: str) -> Iterator[tuple[int, ...]]:
        """Yield the sets of stages that lie on the same ranks as each holder of a tensor."""
        return (self.cut.stages_at(group[0]) for group in self.cut.holders(name))


def bare(name: str) -> str:
    """Return the parameter name in "model/<name>" or "optim/<slot>/<name>"."""
    room, _, rest = name.partition("/")
    return rest.partition("/")[2] if room == "optim" else rest
