"""Exchange of gradient buckets in one backward pass: each is weighted and sent, and its mean is taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import ExchangeContext
from gossamer.loss_reader.count import Kind
from gossamer.own_loop.backward_pass import BackwardPass, PassSettings
from gossamer.own_loop.blocking_exchange import BlockingExchange
from gossamer.own_loop.gradient_buckets import GradientBucket, LoopBuckets
from gossamer.own_loop.pass_status import PassStatus
from gossamer.own_loop.process_group import LoopGroup
from gossamer.own_loop.status_rows import StatusRows


class BucketSender:
    """The sender of the buckets of backward passes."""

    def __init__(
        self, buckets: LoopBuckets, status: PassStatus, pump: CommThread, party: LoopGroup, manner: PassSettings
    ) -> None:
        self._buckets, self._status, self._pump, self._party, self._manner = buckets, status, pump, party, manner
        self.rate: Callable[[], float] = lambda: 1.0  # learning rate, for error feedback

    def begin(self) -> CommStep | BlockingExchange:
        """Return the sender of a pass's buckets, which sends in the same order on all ranks."""
        if all(rounds == 1 for rounds in self._buckets.rounds):
            return BlockingExchange(self._pump.channel)
        return self._pump.begin(self._buckets.rounds, self._buckets.turns)

    def send(self, one: BackwardPass, index: int, held: Collection[str]) -> None:
        """Send a bucket. `held`: parameters with gradients of the passes before in a group."""
        slot = self._buckets.slots[index]
        assert one.exchanging is not None
        slot.sent = True
        flat = slot.bucket.flat
        if slot.tail is not None:
            self._count_in(one, slot, slot.tail, held)
            slot.add_own()
            one.exchanging.submit(index, slot.summed())
            return
        rows = self._status.rows(one)
        if one.is_grouped:
            weights = torch.full((self._party.ranks,), 1 / self._party.ranks, dtype=torch.float64)
        else:
            weights = rows.shares
            if rows.share == 0.0:
                flat.zero_()  # a rank whose loss counts nothing may have nan
        slot.add_own()
        if (scale := self._scale(slot)) != 1.0:
            flat.mul_(1.0 / scale)
        key, levels = (self._manner.seed, one.row.serial), self._pump.channel.levels
        at = ExchangeContext(self._party.rank, levels, weights, key, self.rate(), accounts=False)
        frozen = [
            entry.name
            for entry in slot.layout.entries
            if not self._buckets.params[entry.name].requires_grad
            and entry.name not in one.arrived
            and entry.name not in held
        ]
        one.exchanging.submit(index, slot.exchanged(at, frozen))

    def take_means(self, one: BackwardPass, mine: Iterable[str]) -> dict[str, bool]:
        """Wait for all buckets of a pass, and put the means of all ranks into them.

        `mine`: parameters that this rank has a gradient for. Returns for each whether any rank has one.
        """
        assert one.exchanging is not None
        rows = self._status.rows(one)
        is_marked = any(slot.tail is None for slot in self._buckets.slots)
        marking = self._status.start_marks(self._buckets.marks(mine)) if is_marked else None
        anywhere: dict[str, bool] = {}
        for index, slot in enumerate(self._buckets.slots):
            outcome = one.exchanging.result(index)
            if slot.tail is not None:
                total, *had = slot.tail.tolist()
                anywhere |= {e.name: mark > 0 for e, mark in zip(slot.layout.entries, had, strict=True)}
                self._divide(one, slot, total, rows)
                slot.pending = outcome.state
                continue
            factor = 1.0 if one.is_grouped else rows.factor
            if outcome.mean.data_ptr() != slot.bucket.flat.data_ptr():
                slot.bucket.flat.copy_(outcome.mean)
            slot.pending = outcome.state
            if (times := factor * self._scale(slot)) != 1.0:
                slot.bucket.flat.mul_(times)
        if marking is not None:
            (marked,) = marking.wait()
            anywhere = self._buckets.had(marked)
        return anywhere

    def _count_in(self, one: BackwardPass, slot: GradientBucket, tail: Tensor, held: Collection[str]) -> None:
        """Multiply a bucket by this rank's loss denominator, and write that and the parameters' marks into its tail."""
        counted = one.row.counted
        count = 1.0 if one.is_grouped or not counted.counts else max(0.0, counted.counts[0])
        if count == 0.0:
            slot.bucket.flat.zero_()  # a rank whose loss counts nothing may have nan
        elif count != 1.0:
            slot.bucket.flat.mul_(count)
        had = [float(entry.name in one.arrived or entry.name in held) for entry in slot.layout.entries]
        tail.copy_(torch.tensor([count, *had], dtype=tail.dtype))

    def _scale(self, slot: GradientBucket) -> float:
        """Return the loss scale that gradients are divided by, so that residuals have no scale."""
        keeps = self._manner.scale is not None and slot.has_state
        return self._manner.scale() if keeps and self._manner.scale is not None else 1.0

    def _divide(self, one: BackwardPass, slot: GradientBucket, total: float, rows: StatusRows) -> None:
        """Turn a bucket's sum of gradients times denominators into the gradient of the global batch."""
        if one.is_grouped:
            slot.bucket.flat.mul_(1 / self._party.ranks)
        elif rows.kind is not Kind.SUM and total not in (0.0, 1.0):
            slot.bucket.flat.div_(total)
