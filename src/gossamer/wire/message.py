"""What a method yields to have sent, and what it ends with."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor


class Combine(Enum):
    """What the wire does with the messages of the ranks of one group.

    SUM, MAX: every rank gets the elementwise result, each part shaped as sent (summed in the part's own storage).
    GATHER:   every rank gets each part stacked over ranks, (ranks, *shape).
    SHUFFLE:  part[i] goes to rank i; every rank gets (ranks, *shape[1:]), row i from rank i.
    """

    SUM = "sum"
    MAX = "max"
    GATHER = "gather"
    SHUFFLE = "shuffle"


@dataclass(frozen=True, slots=True)
class Message:
    """Parts to be combined over the group of this rank at `level`. All ranks of the group send the same shapes."""

    parts: tuple[Tensor, ...]
    combine: Combine
    level: str = "all"

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parts)


@dataclass(frozen=True, slots=True)
class Levels:
    """Named partitions of the ranks. `groups[level]` lists disjoint groups of ranks, ascending."""

    groups: Mapping[str, tuple[tuple[int, ...], ...]]

    @staticmethod
    def flat(ranks: int) -> Levels:
        """One level, `all`, with every rank in one group."""
        return Levels({"all": (tuple(range(ranks)),)})

    def group(self, level: str, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` exchanges with at `level`, itself included."""
        for group in self.groups[level]:
            if rank in group:
                return group
        raise KeyError(f"rank {rank} is in no group of level {level!r}")


@dataclass(frozen=True, slots=True)
class Round:
    """The circumstances of one exchange: who I am, with whom, whose share counts how much.

    `weights` (ranks,) float64, sums to 1: the share of every rank's input in the mean. `key` is (seed, step).
    """

    rank: int
    levels: Levels
    weights: Tensor
    key: tuple[int, int]
    lr: float


@dataclass(frozen=True, slots=True)
class State:
    """What a method carries from step to step: named tensors, and the states of the methods nested in it.

    A tensor of the bucket's own size is kept by parameter name in checkpoints; others under their own name.
    Never mutated: a method hands back a new one.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    inner: tuple[State, ...] = ()

    def flatten(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """(path, tensor) of this state and the nested ones, in a fixed order."""
        for name in sorted(self.tensors):
            yield f"{prefix}{name}", self.tensors[name]
        for index, state in enumerate(self.inner):
            yield from state.flatten(f"{prefix}{index}/")

    def replace(self, tensors: Mapping[str, Tensor], prefix: str = "") -> State:
        """The same structure with the tensors of `tensors`, keyed as `flatten` names them."""
        own = {name: tensors[f"{prefix}{name}"] for name in self.tensors}
        return State(own, tuple(s.replace(tensors, f"{prefix}{i}/") for i, s in enumerate(self.inner)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an exchange.

    `mean`: weighted mean over ranks, flat like the bucket. `kept`: the part of MY input that the mean accounts for;
    None says all of it (a loss-free exchange, which may then have used its input's storage). `state`: the NEW state.
    """

    mean: Tensor
    kept: Tensor | None
    state: State


Rounds: TypeAlias = Generator[Message, tuple[Tensor, ...], Outcome]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One message before it exists: `elements` of `itemsize` bytes, combined at `level`."""

    combine: Combine
    elements: int
    itemsize: int
    level: str = "all"

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    def message(self) -> Message:
        """A message of that size without storage."""
        dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}[self.itemsize]
        return Message((torch.empty(self.elements, dtype=dtype, device="meta"),), self.combine, self.level)
