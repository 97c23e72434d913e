"""How ranks divide weights and states in tiers: each parameter is in the file of one rank, which updates it.

Whole parameters, as an update of some rows rounds in another way than one of all: kernels compute the last numbers of a
tensor, fewer than a vector, without fused operations.

The weights of a unit are read by the ranks that have them, into memory that is zero elsewhere, and an OR over the ranks
completes it in place: no padding to the largest share, no second copy. Ranks do so in the order in which they run the
units. Before each stands the number of the unit, so that ranks which run units in different orders learn it from each
other instead of taking wrong weights.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Layout
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, Rounds, Traffic
from gossamer.sharding._row_partition import RowPart, RowPartition, RowRange
from gossamer.sharding._unshard_order import LEVEL, UnshardOrder, UnshardUnit
from gossamer.spec.errors import PeerLost, RunFailed
from gossamer.spec.units import show_seconds
from gossamer.store.tier_file import paged

_WORD = torch.int64  # in which units are combined


@dataclass(frozen=True, slots=True)
class TierShares:
    """Which parameters `rank` has in its file, all rows or none of each, in the partition `deal`.

    A rank with a whole model is the case in which nothing is divided.
    """

    deal: RowPartition
    rank: int

    @property
    def divides(self) -> bool:
        """Return whether other ranks have parameters that this one has not."""
        return bool(self.deal.path) and len(self.deal.levels.group("all", self.rank)) > 1

    def has(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether this rank has a parameter."""
        return not self.divides or self.rows(name, shape).count > 0

    def rows(self, name: str, shape: Sequence[int]) -> RowRange:
        """Return the rows that this rank has of a parameter."""
        return self.deal.rows(name, shape, self.rank)

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor shaped like the parameter `name` where this rank has that, else an empty one."""
        return tensor if self.has(name, tensor.shape) else tensor.new_empty(0)

    def part(self, layout: Layout) -> RowPart:
        """Return the ranges of this rank's parameters in a bucket."""
        return self.deal.part(layout, self.rank)

    def traffic(self, walk: UnshardOrder, microbatches: int) -> Iterator[Traffic]:
        """Yield the messages of a step in which no weight stays from forward to backward: no step sends more."""
        back = [unit for unit in walk.units if unit.goes_back]
        number = Traffic(Collective.GATHER, 1, 8)
        yield number
        for unit in (walk.always, *microbatches * (*walk.units, *back)):
            if unit.layouts:
                yield number
                yield Traffic(Collective.OR, unit_bytes(unit) // _WORD.itemsize, _WORD.itemsize)


def unit_bytes(unit: UnshardUnit) -> int:
    """Return the bytes of a unit's weights in memory: whole pages of each."""
    return sum(paged(one.numel * layout.dtype.itemsize) for layout in unit.layouts for one in layout.entries)


@dataclass(frozen=True, slots=True)
class UnitUnderWay:
    """A unit of which this rank reads what it has, and then gets what others have. `name`: of the unit."""

    read: Future[None]
    step: CommStep
    name: str

    def result(self) -> None:
        """Wait until all weights are there. Raises what ended the read or the messages."""
        self.read.result()
        _meet(self.step, f"the weights of {self.name}")


class UnitCompletion(ABC):
    """What completes the weights of a unit after this rank has read what it has of them."""

    @abstractmethod
    def begin(self, number: int, memory: Tensor, read: Future[None]) -> Future[None] | UnitUnderWay:
        """Complete a unit's `memory`, whole pages as bytes, once `read` has put there what this rank has.

        What it has not is zero. All ranks must begin units in the same order.
        """

    @abstractmethod
    def finish(self) -> None:
        """Learn that all ranks have run the same units, and read no more of them in this step. All ranks call it."""


@dataclass(frozen=True, slots=True)
class WholeUnits(UnitCompletion):
    """The completion of a rank that has all weights: what it has read is all of a unit."""

    def begin(self, number: int, memory: Tensor, read: Future[None]) -> Future[None] | UnitUnderWay:
        return read

    def finish(self) -> None:
        """Do nothing: no other rank reads weights that this one has."""


@dataclass(frozen=True, slots=True)
class WeightGather(UnitCompletion):
    """What completes units, on a communication thread of its own. `names`: of the units, by their number."""

    shares: TierShares
    pump: CommThread
    names: tuple[str, ...]

    def begin(self, number: int, memory: Tensor, read: Future[None]) -> Future[None] | UnitUnderWay:
        step = self.pump.begin([2])

        def follow(done: Future[None]) -> None:
            if done.cancelled() or done.exception() is not None:
                step.drop()
            else:
                step.submit(0, self._completed(number, memory.view(_WORD)))

        read.add_done_callback(follow)
        return UnitUnderWay(read, step, self.names[number])

    def finish(self) -> None:
        step = self.pump.begin([1])
        step.submit(0, self._met(len(self.names)))
        _meet(step, "all ranks to have run the same units")

    def _completed(self, number: int, memory: Tensor) -> Rounds:
        yield from self._met(number)
        (whole,) = yield Message((memory,), Collective.OR, LEVEL)
        if whole.data_ptr() != memory.data_ptr():
            memory.copy_(whole)
        return Outcome(memory[:0], None, ExchangeState())

    def _met(self, number: int) -> Rounds:
        mine = torch.tensor([number], dtype=torch.int64)
        (numbers,) = yield Message((mine,), Collective.GATHER, LEVEL)
        told = numbers.flatten().tolist()
        if len(set(told)) > 1:
            ranks = self.shares.deal.levels.group("all", self.shares.rank)
            names = (*self.names, "the end of the step")
            at = [f"rank {rank} is at {names[n]}" for rank, n in zip(ranks, told, strict=True)]
            raise RunFailed(
                f"ranks run the units of the model in different orders: {', '.join(at)}. The weights of a unit are "
                "where another rank has them, so all must run it, and in the same order. Set "
                "plan.sharding.tiers.shard_group to none, with which each rank has all weights in its file"
            )
        return Outcome(numbers, None, ExchangeState())


def _meet(step: CommStep, awaited: str) -> None:
    """Wait for the only job of `step`. Raises what ended it; for a lost peer it says what was awaited."""
    began = time.perf_counter()
    try:
        step.result(0)
    except PeerLost as error:
        raise PeerLost(
            f"{error}. It had waited {show_seconds(time.perf_counter() - began)} for {awaited}. Where no rank ended "
            "before, one runs other units than this rank, or waits for memory that plan.sharding.tiers.host limits: "
            "set plan.sharding.tiers.shard_group to none, or host higher"
        ) from error


def compacted(flat: Tensor, part: RowPart) -> Tensor:
    """Move the elements of `part` to the start of `flat`, and return the view of them."""
    done = 0
    for at, numel in part:
        step = at - done  # what is moved at a time does not overlap its place
        for off in range(0, numel if step else 0, max(1, step)):
            count = min(step, numel - off)
            flat[done + off : done + off + count].copy_(flat[at + off : at + off + count])
        done += numel
    return flat[:done]
