"""Status messages of backward passes and steps: one row of numbers per rank, all of one length.

All ranks send the same kind of row at the same time. If they are at different points of their loops, each rank raises
an error that names the points, before any parameter has moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.loss_reader.count import Kind, LossCount
from gossamer.spec.errors import BadInput, WireMismatch, bad_input

BACKWARD, STEP, LOSS, TAKEN, CHOICE = 1, 2, 3, 4, 5
_DOING = {
    BACKWARD: "backward pass",
    STEP: "optimizer.step() after backward pass",
    LOSS: "the closure of optimizer.step(), after backward pass",
    TAKEN: "the registration of unfrozen parameters, after backward pass",
    CHOICE: "the choice of an exchange, after backward pass",
}
_KINDS = list(Kind)
_BESIDE = 7  # additional values of a row
TOLD = 5  # of these, the ones that must be equal at a step
_COUNTS = 4  # different denominators of a loss, at most
_SAME = 1e-9  # tolerance of equal weights


@dataclass(frozen=True, slots=True)
class RowMark:
    """The position of a rank in its loader: `number` of the batch, and `print`, a 32-bit hash of it, 0 for its own
    data.
    """

    number: int = 0
    print: int = 0


@dataclass(frozen=True, slots=True)
class Deferred:
    """The values that a rank would have sent at an optimizer step, sent with the next backward pass's row instead.

    `judge` gets those of all ranks, (ranks, TOLD), and raises if they differ.
    """

    told: tuple[float, ...]
    judge: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class StatusRow:
    """The status message of one rank: position in the loop, loss denominators and batch hash."""

    kind: int
    serial: int
    counted: LossCount = field(default_factory=lambda: LossCount(Kind.FREE))
    mark: RowMark = field(default_factory=RowMark)
    beside: tuple[float, ...] = ()

    @staticmethod
    def of(kind: int, serial: int, counted: LossCount, mark: RowMark, *, beside: tuple[float, ...]) -> StatusRow:
        """Return a status row; a loss with more than four different denominators is marked unknown."""
        if len(counted.counts) > _COUNTS:
            said = f"{len(counted.counts)} means with different denominators (at most {_COUNTS} are supported)"
            counted = LossCount(Kind.UNKNOWN, shape=counted.shape, said=said)
        return StatusRow(kind, serial, counted, mark, beside)

    def tensor(self) -> Tensor:
        """Return the row as (21,) float64."""
        one = self.counted
        counts = [*one.counts, *(0.0,) * (_COUNTS - len(one.counts))]
        head = [self.kind, self.serial, _KINDS.index(one.kind), one.shape, len(one.counts), *counts]
        beside = [*self.beside, *(0.0,) * (_BESIDE - len(self.beside))]
        tail = [one.is_least, one.rows, one.strangers]
        return torch.tensor([*head, self.mark.number, self.mark.print, *beside, *tail], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class StatusRows:
    """The status rows of all ranks. `shares` (ranks,): each rank's weight in the mean gradient. `factor`: what the mean
    is multiplied by to become the gradient of the global batch (the number of ranks with rows, if losses are sums).
    """

    table: Tensor  # (ranks, 21)
    rank: int
    mine: StatusRow
    kind: Kind  # of all ranks' losses
    shares: Tensor
    factor: float

    @staticmethod
    def of(table: Tensor, rank: int, mine: StatusRow) -> StatusRows:
        """Build the rows from the gathered `table` (ranks, 21), and derive weights from the loss denominators."""
        ranks = len(table)
        kinds = {_KINDS[int(k)] for k in table[:, 2].tolist()}
        is_sum = kinds == {Kind.SUM}
        kind = Kind.MEAN if kinds <= {Kind.MEAN, Kind.DIVIDED} else min(kinds, key=_KINDS.index)
        counts = table[:, 5]  # (ranks,)
        if is_sum:
            counts = (counts >= 0).double()  # a rank without own rows sends -1
        total = float(counts.clamp_min(0).sum())
        even = torch.full((ranks,), 1 / ranks, dtype=torch.float64)
        shares = counts.clamp_min(0) / total if total and not kinds <= {Kind.FREE} else even
        return StatusRows(table, rank, mine, kind, shares, total if is_sum else 1.0)

    @property
    def share(self) -> float:
        """Return this rank's weight in the mean gradient."""
        return float(self.shares[self.rank])

    @property
    def beside(self) -> Tensor:
        """Return the additional values of all rows, (ranks, 7)."""
        return self.table[:, 11 : 11 + _BESIDE]

    def check(self) -> None:
        """Raise WireMismatch or BadInput if ranks differ in position or batch, or their losses have no common mean."""
        self._check_place()
        if self.mine.kind == BACKWARD:
            self._check_group()
            self._check_batch()
            self._check_loss()

    def _check_place(self) -> None:
        places = [(int(kind), int(serial)) for kind, serial in self.table[:, :2].tolist()]
        if len(set(places)) > 1:
            said = ", ".join(f"rank {rank} in {_DOING[kind]} {serial}" for rank, (kind, serial) in enumerate(places))
            raise WireMismatch(
                f"the ranks are at different points of their training loops: {said}. Call backward and step equally "
                "often on every rank: make each condition for a `continue`, `break` or step the same on all ranks"
            )

    def _check_group(self) -> None:
        held = [bool(mark) for mark in self.beside[:, 1 + TOLD].tolist()]
        if len(set(held)) > 1:
            waiting = ", ".join(str(rank) for rank, one in enumerate(held) if one)
            sent = ", ".join(str(rank) for rank, one in enumerate(held) if not one)
            raise bad_input(
                wanted=f"backward pass {self.mine.serial} averaged at once on all ranks, or later on all ranks",
                got=f"one that waits for others (accumulate=, model.no_sync()) on rank {waiting}, and is averaged on "
                f"rank {sent}",
                do="use model.no_sync() on all ranks or on none; register hooks on parameters (param.register_hook), "
                "by which every pass is averaged, on all ranks or on none; and let all loaders have equally many "
                "batches",
            )

    def _check_batch(self) -> None:
        marks = [(int(number), int(found)) for number, found in self.table[:, 9:11].tolist()]
        if len({found for _, found in marks}) > 1:
            said = ", ".join(f"rank {rank} is at batch {n} (hash {found:08x})" for rank, (n, found) in enumerate(marks))
            raise bad_input(
                wanted="the same batches in the same order on all ranks, as each rank takes its rows of every batch",
                got=said,
                do="seed the random generators of the loader alike on all ranks and remove any DistributedSampler, or "
                "pass split=False if every rank's loader yields its own data",
            )

    def _check_loss(self) -> None:
        kinds = [_KINDS[int(k)] for k in self.table[:, 2].tolist()]
        one = self.mine.counted
        what = f"backward pass {self.mine.serial}"
        sizes = self.beside[:, 0].tolist()
        if len(set(sizes)) > 1:
            raise bad_input(
                wanted=f"the same trained parameters on all ranks in {what}",
                got=f"{[int(size) for size in sizes]} trained parameters by rank",
                do="set requires_grad alike on all ranks",
            )
        do = (
            "pass loss='sum' if the loss is a sum over rows; or weight=, a function of a batch that returns the "
            "number of labels or rows that the loss is a mean over; or call backward on each loss term separately"
        )
        if Kind.UNKNOWN in kinds:
            told = one.said if one.kind is Kind.UNKNOWN else "a loss whose denominator another rank cannot read"
            raise bad_input(wanted=f"in {what} a loss that is a mean or a sum over rows", got=told, do=do)
        if len(set(self.table[:, -1].tolist()) - {-1.0}) > 1:
            raise bad_input(
                wanted=f"in {what} a loss that is a mean or a sum over rows",
                got="a loss that combines rows with a tensor that is not the same on all ranks, so that it depends on "
                "rows as well",
                do=do,
            )
        self._check_least(what, do)
        if Kind.DIVIDED in kinds:
            counted = [(kind, count) for kind, count in zip(kinds, self.table[:, 5].tolist(), strict=True) if count]
            if Kind.DIVIDED in dict(counted) and len({count for _, count in counted}) == 1:
                raise BadInput(
                    f"{what}: the loss is a sum divided by a number that is equal on all ranks ({one.said}), which may "
                    f"be a count of each rank's labels or a constant: {do}"
                )
        if (
            len({Kind.MEAN if one is Kind.DIVIDED else one for one in kinds}) > 1
            or len(set(self.table[:, 3].tolist())) > 1
        ):
            raise bad_input(
                wanted=f"in {what} the same loss on all ranks",
                got=f"{one.said or one.kind.value} on rank {self.rank}, and a different loss on another rank",
                do="compute the same loss with the same factors on all ranks",
            )
        self._check_shares(what, do)

    def _check_least(self, what: str, do: str) -> None:
        """Check sums divided by 1. The 1 is a count where all ranks count rows; else max(1, n) may have kept an empty
        sum from being divided by 0.
        """
        counts, least, rows = self.table[:, 5], self.table[:, -3] > 0, self.table[:, -2]
        if bool(least.any()) and bool(((counts != rows) & (counts > 0)).any()):
            raise bad_input(
                wanted=f"in {what} a loss whose number of labels or rows is known on every rank",
                got=f"{self.mine.counted.said}: divided by 1 on rank "
                f"{', '.join(str(int(r)) for r in least.nonzero())}, which may be a count of 1, or a count n of 0 in "
                "max(1, n)",
                do=do,
            )

    def _check_shares(self, what: str, do: str) -> None:
        """Check that terms with different denominators are in proportion on all ranks: they have one common weight."""
        one, terms = self.mine.counted, int(self.table[:, 4].max())
        for term in range(1, terms):
            counts = self.table[:, 5 + term]
            total = float(counts.sum())
            if total and float((counts / total - self.shares).abs().max()) > _SAME:
                raise bad_input(
                    wanted=f"in {what} loss terms whose denominators have the same ratio on all ranks, as each rank "
                    "has a single weight in the mean gradient",
                    got=f"{one.said}, with denominators {self.table[:, 5].tolist()} and {counts.tolist()} by rank",
                    do=do,
                )
