"""The messages that a method yields to the communication thread, and the outcome it returns."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer.spec.errors import BadInput
from gossamer.spec.mesh import Mesh


class Collective(Enum):
    """The collective operation that combines the messages of the ranks of one group.

    SUM, MAX: every rank gets the elementwise result, each part shaped as sent (summed in the part's own storage).
    OR:       the same, bit by bit, of integer parts on the CPU (NCCL has no such reduction; gloo is always there).
    GATHER:   all-gather: every rank gets each part stacked over ranks, (ranks, *shape).
    SHUFFLE:  all-to-all: part[i] goes to rank i; every rank gets (ranks, *shape[1:]), row i from rank i. With `splits`,
              uneven (all-to-all-v): splits[i] rows go to rank i and arriving[i] rows come from it, concatenated in rank
              order.
    """

    SUM = "sum"
    MAX = "max"
    OR = "or"
    GATHER = "gather"
    SHUFFLE = "shuffle"


@dataclass(frozen=True, slots=True)
class Message:
    """A message: parts to be combined over the group of this rank at `level`. All ranks of the group send equal shapes.

    Only an uneven all-to-all may differ between ranks: one rank's `splits` for a peer equal the peer's `arriving` for
    that rank. Two ranks that have no rows for each other exchange nothing, and a rank without any rows to send or
    receive need not take part: a point-to-point message is an all-to-all of two ranks. Between two ranks, in one
    direction, messages arrive in the order of sending.
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
    """The process groups of all ranks, by level. `groups[level]` lists disjoint groups of ranks, ascending.

    `all` holds the ranks whose gradients are averaged together; where these are several groups, `world` holds every
    rank.
    """

    groups: Mapping[str, tuple[tuple[int, ...], ...]]

    @staticmethod
    def flat(ranks: int) -> ProcessGroups:
        """Return one level, `all`, with every rank in one group."""
        return ProcessGroups.of(Mesh(replicas=ranks))

    @staticmethod
    def of(mesh: Mesh) -> ProcessGroups:
        """Return the levels at which the ranks of `mesh` exchange messages."""
        return ProcessGroups(mesh.levels())

    @staticmethod
    def islands(islands: Sequence[Sequence[int]]) -> ProcessGroups:
        """Return three levels: `all`; `island`, the ranks behind one fast link; `between`, one rank of every island.

        The k-th ranks of all islands form a group of `between`. Where islands are unequal, ranks without a counterpart
        in every island are alone there: they own nothing that is exchanged between islands.
        """
        return ProcessGroups.of(Mesh.of_islands(islands))

    def owners(self, rank: int) -> tuple[int, ...]:
        """Return the ranks in the island of `rank` that have a counterpart in every island.

        These are the island's first ranks, as many as the smallest island has.
        """
        everyone = self.group("all", rank)
        return self.group("island", rank)[: min(len(g) for g in self.groups["island"] if g[0] in everyone)]

    @property
    def owners_by_island(self) -> tuple[tuple[int, ...], ...]:
        """The first ranks of every island, as many as the smallest has; none where there are no islands."""
        islands = self.groups.get("island", ())
        owners = min(map(len, islands), default=0)
        return tuple(island[:owners] for island in islands)

    @property
    def whole(self) -> str:
        """The level whose one group holds every rank."""
        return "world" if "world" in self.groups else "all"

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(r for group in self.groups[self.whole] for r in group))

    def has_several(self, level: str) -> bool:
        """Return whether there are several groups at `level`, as of islands that have others to average with."""
        return len(self._groups_of(level)) > 1

    @property
    def is_alone(self) -> bool:
        """Return whether one rank is all there is: no other has part in what it computes."""
        return len(self.everyone) == 1

    def only(self, level: str) -> ProcessGroups:
        """Return the groups of `level` alone, named `all`, for a method that runs at this level."""
        return ProcessGroups({"all": self._groups_of(level)})

    def and_more(self, levels: ProcessGroups) -> ProcessGroups:
        """Return these levels and those of `levels`, which count where a name is in both."""
        return ProcessGroups({**self.groups, **levels.groups})

    def twice(self) -> ProcessGroups:
        """Return every level twice: again under `late(level)`, for messages beside those of the steps.

        The second copy has a message order of its own. Also adds `WORD`, a level of every rank, for small status
        messages that may overtake those too.
        """
        own = {level: groups for level, groups in self.groups.items() if not is_late(level)}
        return ProcessGroups({**own, **{late(level): groups for level, groups in own.items()}, WORD: (self.everyone,)})

    def group(self, level: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` communicates with at `level`, itself included.

        Raises BadInput where there is no such level, or no group of it holds the rank.
        """
        group = next((group for group in self._groups_of(level) if rank in group), None)
        if group is None:
            raise self._unknown(level, f"of rank {rank}")
        return group

    def _groups_of(self, level: str) -> tuple[tuple[int, ...], ...]:
        if level not in self.groups:
            raise self._unknown(level, "of an exchange")
        return self.groups[level]

    def _unknown(self, level: str, what: str) -> BadInput:
        return BadInput(
            f"the process group {level!r} {what} does not exist, the process groups are {', '.join(self.groups)}: "
            "list the ranks of each island in machines.islands, or choose methods without islands"
        )


_LATE = "late "


def late(level: str) -> str:
    """Return the name of the second process group with the ranks of `level`, whose messages run beside the steps'."""
    return f"{_LATE}{level}"


def is_late(level: str) -> bool:
    """Return whether `level` names a second copy of a process group, which has its own message order (see `late`)."""
    return level.startswith(_LATE)


WORD = late("word")
AHEAD = 4  # steps by which ranks that exchange status messages alone can drift apart, and may wait for each other


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """The context of one exchange: this rank, the process groups, the weights in the mean, the random key.

    `weights` (ranks,) float64, sums to 1 over each group of level `all`: the weight of every rank's input in the mean.
    `key` is (seed, step). `lr`: learning rate of the step. `accounts`: whether the caller reads the compression error
    (`Outcome.lost`).
    """

    rank: int
    levels: ProcessGroups
    weights: Tensor
    key: tuple[int, int]
    lr: float
    accounts: bool = True

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks whose inputs are averaged together, ascending."""
        return self.levels.group("all", self.rank)

    @property
    def place(self) -> int:
        """The index of this rank among the members."""
        return self.members.index(self.rank)

    @property
    def shares(self) -> list[float]:
        """The weights of the members, in their order."""
        return [float(self.weights[r]) for r in self.members]

    @property
    def share(self) -> float:
        """The weight of this rank."""
        return float(self.weights[self.rank])


@dataclass(frozen=True, slots=True)
class ExchangeState:
    """The state that a method carries from step to step: named tensors, and the states of the methods nested in it.

    Checkpoints keep a tensor of the bucket's own size by parameter name, others under their own name. The tensor "e" is
    this rank's error-feedback residual: it may move from one method to another, but must never be dropped. A state is
    immutable: a method returns a new one.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    inner: tuple[ExchangeState, ...] = ()

    def flatten(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield (path, tensor) of this state and the nested ones, in a fixed order."""
        for name in sorted(self.tensors):
            yield f"{prefix}{name}", self.tensors[name]
        for index, state in enumerate(self.inner):
            yield from state.flatten(f"{prefix}{index}/")

    def replace(self, tensors: Mapping[str, Tensor], prefix: str = "") -> ExchangeState:
        """Return a state of the same structure with the tensors of `tensors`, keyed as `flatten` names them."""
        own = {name: tensors[f"{prefix}{name}"] for name in self.tensors}
        return ExchangeState(own, tuple(s.replace(tensors, f"{prefix}{i}/") for i, s in enumerate(self.inner)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an exchange.

    `mean`: weighted mean over ranks, flat like the bucket. `lost`: compression error of this rank, float32: the part of
    its input that the mean does not contain. None: nothing is lost now (a lossless exchange) or in the long run (error
    feedback keeps it), or the caller does not read it (`ExchangeContext.accounts`). `state`: the new state.

    `owed`: error of the mean itself, by a second encoding on this rank, where its input has no weight to which the
    error could be charged; float32, in the unit of the mean, and None on every rank that has weight. So

        mean = sum_i (w_i kept_i - owed_i),   kept_i = x_i - lost_i
    """

    mean: Tensor
    lost: Tensor | None
    state: ExchangeState
    owed: Tensor | None = None

    def less_lost(self, x: Tensor) -> Tensor:
        """Return `x` less the compression error of this rank, in place."""
        return x if self.lost is None else x.sub_(self.lost)

    def less_owed(self, x: Tensor) -> Tensor:
        """Return `x` less the error of the mean itself, in place."""
        return x if self.owed is None else x.sub_(self.owed)


Rounds: TypeAlias = Generator[Message, tuple[Tensor, ...], Outcome]


def sent_at(method: Rounds, level_of: Callable[[str], str]) -> Rounds:
    """Run `method` with each message sent at `level_of(level)` instead of the level that it names."""
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
    """The size of one message before it exists: `elements` of `itemsize` bytes, combined at `level`.

    `splits` and `arriving` are those of an uneven all-to-all, in elements.
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
        """Return a message of this size without storage (device meta)."""
        dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}[self.itemsize]
        part = torch.empty(self.elements, dtype=dtype, device="meta")
        return Message((part,), self.combine, self.level, self.splits, self.arriving)

    @staticmethod
    def of(message: Message) -> Traffic:
        """Return the traffic of a message of one part."""
        (part,) = message.parts
        rows = max(1, part.shape[0] if part.dim() else 1)
        row = part.numel() // rows
        splits = None if message.splits is None else tuple(n * row for n in message.splits)
        arriving = None if message.arriving is None else tuple(n * row for n in message.arriving)
        return Traffic(message.combine, part.numel(), part.element_size(), message.level, splits, arriving)
