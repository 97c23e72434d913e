"""Exchange of gradient buckets in one backward pass: each is weighted and sent, and its mean is taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import ExchangeContext
from gossamer.comm.random_key import key_at
from gossamer.loss_reader.count import Kind
from gossamer.own_loop.backward_pass import BackwardPass, PassSettings
from gossamer.own_loop.blocking_exchange import BlockingExchange
from gossamer.own_loop.gradient_buckets import GradientBucket, LoopBuckets
from gossamer.own_loop.learning_rates import LearningRates
from gossamer.own_loop.pass_status import PassStatus
from gossamer.own_loop.process_group import LoopGroup
from gossamer.own_loop.status_rows import StatusRows


class BucketSender:
    """The sender of the buckets of backward passes.

    `rates`: of what the buckets hold, for error feedback. `sees`, if any: is shown this rank's mean gradients of each
    bucket, before it is sent. `steps`: committed so far, as `gossamer train` counts them: while the first one is made
    they are 0.
    """

    def __init__(
        self, buckets: LoopBuckets, status: PassStatus, pump: CommThread, party: LoopGroup, manner: PassSettings
    ) -> None:
        self._buckets, self._status, self._pump, self._party, self._manner = buckets, status, pump, party, manner
        self.rates, self._rate_of = LearningRates(), dict[int, float]()
        self.sees: Callable[[Mapping[str, Tensor]], None] | None = None
        self.steps = 0
        self._passes = 0  # exchanged since the last step

    def begin(self) -> CommStep | BlockingExchange:
        """Return the sender of a pass's buckets, which sends in the same order on all ranks."""
        self._rate_of = self.rates.by_parameter() if self._buckets.remembers else {}
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
        if self.sees is not None:
            self.sees(slot.views)
        if (scale := self._scale(slot)) != 1.0:
            flat.mul_(1.0 / scale)
        levels, rate = self._pump.channel.levels, self._rate(slot)
        at = ExchangeContext(self._party.rank, levels, weights, self._key(), rate, accounts=False)
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
        self._passes += 1
        return anywhere

    def count_step(self) -> bool:
        """Count a committed step; return False for one that no pass was exchanged for.

        That is the step of a second optimizer after the same passes, which belongs to the step of the first.
        """
        is_new = self._passes > 0
        self.steps, self._passes = self.steps + is_new, 0
        return is_new

    def _key(self) -> tuple[int, int]:
        """Return the random key of the pass: that of `gossamer train` in a step's first pass, others in later ones."""
        seed = self._manner.seed
        return (key_at((seed, "pass", self._passes), 0).shared if self._passes else seed), self.steps

    def _rate(self, slot: GradientBucket) -> float:
        """Return the largest learning rate of a bucket's parameters: 0 only where no parameter of it moves."""
        ids = [id(self._buckets.params[entry.name]) for entry in slot.layout.entries]
        return max((self._rate_of[one] for one in ids if one in self._rate_of), default=1.0)

    def _count_in(self, one: BackwardPass, slot: GradientBucket, tail: Tensor, held: Collection[str]) -> None:
        """Multiply a bucket by this rank's loss denominator, and write that and the parameters' marks into its tail."""
        counted = one.row.counted
        count = 1.0 if one.is_grouped or not counted.counts else max(0.0, counted.counts[0])
        if count == 0.0:
            slot.bucket.flat.zero_()  # a rank whose loss counts nothing may have nan
        if self.sees is not None:
            self.sees(slot.views)
        if count not in (0.0, 1.0):
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
