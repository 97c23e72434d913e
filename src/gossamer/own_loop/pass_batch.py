"""The batch of a backward pass, as far as this rank knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.own_loop.batches import Share
from gossamer.own_loop.status_rows import RowMark
from gossamer.spec.errors import bad_input

Weigh = Callable[[Any], float]


class PassBatch(ABC):
    """The batch of a backward pass on this rank; compared by identity."""

    number: int  # counted from 1, in the order in which the loader gave them; 0: unknown
    rows: int  # of this rank; 0 where that is not known
    whole: int  # of all ranks
    first: int  # the dimension that has rows, if it is the same in all tensors of two or more dimensions, else 0
    is_known: bool
    is_spare: bool  # whether it has one row of weight 0, as there were fewer rows than ranks
    mark: RowMark

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` shares memory with the batch."""

    @abstractmethod
    def lacks(self, tensor: Tensor) -> bool:
        """Return whether `tensor`, a view of the batch, omits its first or last rows."""

    @abstractmethod
    def counts(self) -> set[float]:
        """Return the values that a loss may divide by in this rank's rows."""

    @abstractmethod
    def weight(self, weigh: Weigh | None) -> float:
        """Return the weight of this rank's mean loss: the user's for the batch, else the rows."""


@dataclass(frozen=True, slots=True, eq=False)
class UnknownBatch(PassBatch):
    """The batch of a pass in a loop whose loader is not wrapped, or that got rows of no known batch."""

    number: int = 0
    rows: int = 0
    whole: int = 0
    first: int = 0
    is_known: bool = False
    is_spare: bool = False
    mark: RowMark = RowMark()  # noqa: RUF009  (frozen)

    def holds(self, tensor: Tensor) -> bool:
        return False

    def lacks(self, tensor: Tensor) -> bool:
        return False

    def counts(self) -> set[float]:
        return set()

    def weight(self, weigh: Weigh | None) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, eq=False)
class KnownBatch(PassBatch):
    """A batch that the wrapped loader gave to the loop: this rank's share of it, and its number."""

    number: int
    share: Share

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.share.rows

    @property
    def whole(self) -> int:  # type: ignore[override]
        return self.share.whole

    @property
    def first(self) -> int:  # type: ignore[override]
        return self.share.first

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_spare(self) -> bool:  # type: ignore[override]
        return self.share.rows == 0

    @property
    def mark(self) -> RowMark:  # type: ignore[override]
        return RowMark(self.number, self.share.mark)

    def holds(self, tensor: Tensor) -> bool:
        return self.share.holds(tensor)

    def lacks(self, tensor: Tensor) -> bool:
        return self.share.lacks(tensor)

    def counts(self) -> set[float]:
        return self.share.counts()

    def weight(self, weigh: Weigh | None) -> float:
        weight = float(self.share.rows) if weigh is None else float(weigh(self.share.batch))
        if not weight >= 0.0:
            raise bad_input(
                wanted="a function that returns 0 or more for every batch",
                got=f"{weight:g} for batch {self.number}",
                do="return the number of labels or rows that the loss is a mean over",
                key="weight",
            )
        return weight


UNKNOWN = UnknownBatch()
