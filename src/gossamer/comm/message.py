"""What a method yields to have sent, and what it ends with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer.spec.errors import BadInput, bad_input


class Collective(Enum):
    """What the wire does with the messages of the ranks of one group.

    SUM, MAX: every rank gets the elementwise result, each part shaped as sent (summed in the part's own storage).
    OR:       the same, bit by bit, of integer parts on the CPU (NCCL has no such reduction; gloo is always there).
    GATHER:   every rank gets each part stacked over ranks, (ranks, *shape).
    SHUFFLE:  part[i] goes to rank i; every rank gets (ranks, *shape[1:]), row i from rank i. With `splits`, uneven:
              splits[i] rows go to rank i and arriving[i] rows come from it, one behind the other, in rank order.
    """

    SUM = "sum"
    MAX = "max"
    OR = "or"
    GATHER = "gather"
    SHUFFLE = "shuffle"


@dataclass(frozen=True, slots=True)
class Message:
    """Parts to be combined over the group of this rank at `level`. All ranks of the group send the same shapes.

    Only an uneven shuffle may differ from rank to rank: what one rank's `splits` say to a peer, the peer's `arriving`
    says of it. Nothing travels between two ranks that have nothing for each other, and a rank that has nothing for
    anybody and awaits nothing need not take part: what one rank sends to one other is a shuffle of those two alone.
    Between two ranks, one direction, what is sent first arrives first.
    """

    parts: tuple[Tensor, ...]
    combine: Collective
    level: str = "all"
    splits: tuple[int, ...] | None = None
    arriving: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parts)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Named partitions of the ranks. `groups[level]` lists disjoint groups of ranks, ascending.

    `all` holds the ranks whose gradients are one sum; where these are several groups, `world` holds every rank.
    """

    groups: Mapping[str, tuple[tuple[int, ...], ...]]

    @staticmethod
    def flat(ranks: int) -> ProcessGroups:
        """One level, `all`, with every rank in one group."""
        return ProcessGroups({"all": (tuple(range(ranks)),)})

    @staticmethod
    def islands(islands: Sequence[Sequence[int]]) -> ProcessGroups:
        """Three levels: `all`; `island`, the ranks behind one fast link; `between`, one rank of every island.

        The k-th ranks of all islands are a group between them. Where islands are unequal, the ranks that have no
        counterpart everywhere are alone there: they own nothing that is exchanged between islands.
        """
        inside = tuple(tuple(sorted(i)) for i in islands)
        owners = min(len(i) for i in inside)
        across = tuple(tuple(sorted(i[k] for i in inside)) for k in range(owners))
        alone = tuple((r,) for i in inside for r in i[owners:])
        everyone = tuple(sorted(r for i in inside for r in i))
        return ProcessGroups({"all": (everyone,), "island": inside, "between": across + alone})

    @staticmethod
    def mesh(replicas: int, stages: int) -> ProcessGroups:
        """Replicas of a model in stages, rank = replica * stages + stage. Three levels: `all`, the ranks that hold the
        same stage; `pipe`, the stages of one replica; `world`.
        """
        if stages == 1:
            return ProcessGroups.flat(replicas)
        ranks = range(replicas * stages)
        same = tuple(tuple(ranks[stage::stages]) for stage in range(stages))
        pipes = tuple(tuple(ranks[r * stages : (r + 1) * stages]) for r in range(replicas))
        return ProcessGroups({"all": same, "pipe": pipes, "world": (tuple(ranks),)})

    @staticmethod
    def staged(stages: Sequence[Sequence[int]]) -> ProcessGroups:
        """Stages on any number of ranks each: `all`, the ranks of one stage; `pipe` and `world`, every rank."""
        everyone = (tuple(sorted(rank for group in stages for rank in group)),)
        return ProcessGroups(
            {"all": tuple(tuple(sorted(group)) for group in stages), "pipe": everyone, "world": everyone}
        )

    def owners(self, rank: int) -> tuple[int, ...]:
        """Those in the island of `rank` that have a counterpart in all islands: the first ones, as many as the smallest
        has ranks.
        """
        everyone = self.group("all", rank)
        return self.group("island", rank)[: min(len(g) for g in self.groups["island"] if g[0] in everyone)]

    @property
    def whole(self) -> str:
        """The level at which every rank meets every other."""
        return "world" if "world" in self.groups else "all"

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(r for group in self.groups[self.whole] for r in group))

    def only(self, level: str) -> ProcessGroups:
        """What a method sees that runs at `level` alone: that level's groups, called `all`."""
        return ProcessGroups({"all": self._groups_of(level)})

    def and_more(self, levels: ProcessGroups) -> ProcessGroups:
        """These, and the others."""
        return ProcessGroups({**self.groups, **levels.groups})

    def twice(self) -> ProcessGroups:
        """Every level a second time, under `late(level)`: for messages that are under way beside those of the steps,
        in an order of their own. And `WORD`, every rank, for the small ones that pass those too.
        """
        own = {level: groups for level, groups in self.groups.items() if not is_late(level)}
        return ProcessGroups({**own, **{late(level): groups for level, groups in own.items()}, WORD: (self.everyone,)})

    def group(self, level: str, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` exchanges with at `level`, itself included. Raises BadInput where there is no such
        level, or no group of it has the rank.
        """
        group = next((group for group in self._groups_of(level) if rank in group), None)
        if group is None:
            raise self._unknown(level, f"that rank {rank} takes part in")
        return group

    def _groups_of(self, level: str) -> tuple[tuple[int, ...], ...]:
        if level not in self.groups:
            raise self._unknown(level, "that something is to meet at")
        return self.groups[level]

    def _unknown(self, level: str, what: str) -> BadInput:
        return bad_input(
            wanted=f"a level {level!r} of the links {what}",
            got=f"the levels {', '.join(self.groups)}",
            do="name methods that speak of these alone, or say in machines.islands who shares a fast link",
        )


_LATE = "late "


def late(level: str) -> str:
    """The name of the same groups for messages that go beside those of the steps (see `ProcessGroups.twice`)."""
    return f"{_LATE}{level}"


def is_late(level: str) -> bool:
    """Whether a level is one of those."""
    return level.startswith(_LATE)


WORD = late("word")
AHEAD = 4  # steps by which ranks that keep in touch by word alone can be apart, and may have to wait for each other


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """The circumstances of one exchange: who I am, with whom, whose share counts how much.

    `weights` (ranks,) float64, sums to 1 over each group of level `all`: the share of every rank's input in the mean.
    `key` is (seed, step). `accounts`: whether anybody will look at what the exchange lost.
    """

    rank: int
    levels: ProcessGroups
    weights: Tensor
    key: tuple[int, int]
    lr: float
    accounts: bool = True

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks whose mean this is, ascending."""
        return self.levels.group("all", self.rank)

    @property
    def place(self) -> int:
        """My index among the members."""
        return self.members.index(self.rank)

    @property
    def shares(self) -> list[float]:
        """The members' weights, in their order."""
        return [float(self.weights[r]) for r in self.members]

    @property
    def share(self) -> float:
        """My own weight."""
        return float(self.weights[self.rank])


@dataclass(frozen=True, slots=True)
class ExchangeState:
    """What a method carries from step to step: named tensors, and the states of the methods nested in it.

    A tensor of the bucket's own size is kept by parameter name in checkpoints; others under their own name. One called
    "e" is what this rank still owes the parameters: it may go from one method to another, but never be dropped.
    Never mutated: a method hands back a new one.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    inner: tuple[ExchangeState, ...] = ()

    def flatten(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """(path, tensor) of this state and the nested ones, in a fixed order."""
        for name in sorted(self.tensors):
            yield f"{prefix}{name}", self.tensors[name]
        for index, state in enumerate(self.inner):
            yield from state.flatten(f"{prefix}{index}/")

    def replace(self, tensors: Mapping[str, Tensor], prefix: str = "") -> ExchangeState:
        """The same structure with the tensors of `tensors`, keyed as `flatten` names them."""
        own = {name: tensors[f"{prefix}{name}"] for name in self.tensors}
        return ExchangeState(own, tuple(s.replace(tensors, f"{prefix}{i}/") for i, s in enumerate(self.inner)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an exchange.

    `mean`: weighted mean over ranks, flat like the bucket. `lost`: the part of MY input that the mean does not account
    for, float32; None: nothing is lost, now (a loss-free exchange) or in time (feedback, which remembers it itself), or
    nobody asked (`Round.accounts`). `state`: the new one. `owed`: what I have lost of the mean itself, by a second
    encoding, where my input has no weight that it could be laid on; float32, in the unit of the mean. So
    mean = sum_i (w_i kept_i - owed_i) with kept_i = x_i - lost_i, and `owed` is None on every rank that has weight.
    """

    mean: Tensor
    lost: Tensor | None
    state: ExchangeState
    owed: Tensor | None = None


Rounds: TypeAlias = Generator[Message, tuple[Tensor, ...], Outcome]


def sent_at(method: Rounds, level_of: Callable[[str], str]) -> Rounds:
    """`method`, whose messages go out at `level_of` the level that it names."""
    reply = None
    try:
        while True:
            message = next(method) if reply is None else method.send(reply)
            reply = yield replace(message, level=level_of(message.level))
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
    finally:
        method.close()


@dataclass(frozen=True, slots=True)
class Traffic:
    """One message before it exists: `elements` of `itemsize` bytes, combined at `level`. `splits` and `arriving` are
    those of an uneven shuffle, in elements.
    """

    combine: Collective
    elements: int
    itemsize: int
    level: str = "all"
    splits: tuple[int, ...] | None = None
    arriving: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    def message(self) -> Message:
        """A message of that size without storage."""
        dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}[self.itemsize]
        part = torch.empty(self.elements, dtype=dtype, device="meta")
        return Message((part,), self.combine, self.level, self.splits, self.arriving)

    @staticmethod
    def of(message: Message) -> Traffic:
        """The traffic of a message of one part."""
        (part,) = message.parts
        rows = max(1, part.shape[0] if part.dim() else 1)
        row = part.numel() // rows
        splits = None if message.splits is None else tuple(n * row for n in message.splits)
        arriving = None if message.arriving is None else tuple(n * row for n in message.arriving)
        return Traffic(message.combine, part.numel(), part.element_size(), message.level, splits, arriving)
