"""The gradient reducer of one rank: bucket gradients, average them during the backward pass, vote before the update.

A step is a transaction. Nothing that outlives it changes before `commit`: the buckets of gradients are overwritten in
the next step, and exchanges return new states. A step sends, in an order that all ranks know:
    weights     every rank's share of the batch, gathered while the forward pass runs
    buckets     one job each, as the exchange sends them, while backward runs
    agreement   is it finite, complete and the same step everywhere? Then, where ranks differ in it, who had no gradient
All three run among the ranks whose gradients are averaged: in a local step, those of one island.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import Collective, ExchangeContext, Message, ProcessGroups, sent_at
from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.sharding import Holding, TieredStates
from gossamer.sync._gradient_buckets import BucketState, GradientBuckets, buckets_of
from gossamer.sync._step_gathers import StepGathers
from gossamer.sync._step_vote import GradientReport, StepAgreement, StepContext, StepVote
from gossamer.sync._timing import Timing

_ALL_HOLD_ALL: Mapping[str, Holding] = MappingProxyType({})


class GradientReducer:
    """A reducer that buckets the gradients of one rank and averages them over ranks during backward (as DDP's Reducer).

    `params` are the trainable parameters by canonical name (tied ones once); with pipeline parallelism, those of this
    rank's stage. `exchange` averages their gradients: one for all, or one by parameter name. Each `.grad` becomes a
    view of a flat bucket, so autograd writes a gradient once and the exchange sends it from there. `holdings`: by
    parameter, the rows whose mean this rank receives and counts in the norm; of one without an entry all ranks hold all
    rows. `meets`: the level the exchange must serve, where it is not `all`; each StepContext names the level of its
    step. `buckets`: the parameters of each bucket, in the order of sending, or one row range of a
    parameter (`spec.row_range`); others get buckets of `bucket_bytes`.
    `turns`: the bucket of each turn of the communication thread. Raise BadInput where an exchange cannot serve its
    buckets or these process groups.

    `gives_back`: free all but the owned rows after the exchange, and allocate a bucket at its first gradient. At most
    as many buckets are pending as the order of messages needs, and backward waits for them. `tiers`: what takes
    over the mean of each bucket as soon as that is known, and says when there is room for another. It is called in the
    communication thread, for one bucket after the other, in an order that is the same on all ranks. Buckets with tied
    weights of several stages stay until `handed_over`, as their gradients are summed after the mean. `keeps_sent`: keep
    a copy of this rank's input to the exchange until the next step.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        exchange: Exchange | Mapping[str, Exchange],
        pump: CommThread,
        *,
        bucket_bytes: int,
        buckets: Sequence[Sequence[str]] = (),
        turns: Sequence[int] = (),
        holdings: Mapping[str, Holding] = _ALL_HOLD_ALL,
        meets: str = "all",
        gives_back: bool = False,
        keeps_sent: bool = False,
        tiers: TieredStates | None = None,
    ) -> None:
        self.meets, self._gives_back, self._keeps_sent = meets, gives_back, keeps_sent
        self._tiers = tiers
        self.timing = Timing()
        self._pump = pump
        self._gathers = StepGathers(pump, self.timing)
        levels, rank = pump.channel.levels, pump.channel.rank
        self._is_alone = levels.is_alone
        self._averages = len(levels.group("all", rank)) > 1  # else a mean is known as soon as a bucket is full
        self._buckets = GradientBuckets(params, holdings=holdings, gives_back=gives_back)
        exchanges = dict.fromkeys(params, exchange) if isinstance(exchange, Exchange) else exchange
        self._lay_out(exchanges, bucket_bytes=bucket_bytes, buckets=buckets, turns=turns)
        self._watching = False
        self._touched: set[str] = set()  # parameters that have a gradient in this step
        self._sent_before: dict[str, int] = {}
        self._beside_before: dict[str, int] = {}
        self._exchanging = CommStep(())
        self._buckets.adopt_views()
        self._hooks = [_watch(p, _Hook(self, name)) for name, p in params.items()]
        if gives_back:
            self._hooks += [p.register_hook(_FirstHook(self, name)) for name, p in params.items()]  # type: ignore[no-untyped-call]

    def _lay_out(
        self,
        exchanges: Mapping[str, Exchange],
        *,
        bucket_bytes: int,
        buckets: Sequence[Sequence[str]],
        turns: Sequence[int],
    ) -> None:
        cut = buckets_of(self._buckets.params, exchanges, bucket_bytes=bucket_bytes, named=buckets)
        for layout, one in cut:
            self._method(one, self.meets).check(layout, self._meeting_at(self.meets))
        self._buckets.replace_buckets(cut)
        # A planned order holds more buckets at a time than one that looks ahead: not where they are to be given back.
        self._turns = () if self._gives_back else tuple(turns)
        self._rounds: dict[str, list[int]] = {}  # messages of every bucket's exchange, by the level of the average

    def adopt(
        self,
        exchanges: Mapping[str, Exchange],
        *,
        bucket_bytes: int,
        buckets: Sequence[Sequence[str]] = (),
        turns: Sequence[int] = (),
    ) -> None:
        """Replace the exchanges between two steps and carry their state over, by parameter name and size.

        Residuals ("e") are carried over also where they are nested at another depth; all other state starts anew. So
        does what one rank of an island keeps for all of it, in buckets that were not there before: another rank may be
        the one to keep it. Raise BadInput, changing nothing, where an exchange cannot serve, or keeps no residual where
        there is one now. All ranks must call it.
        """
        self._buckets.check_owed(exchanges)
        held, before = self.states(), {tuple(e.name for e in layout.entries) for layout in self.layouts}
        self._gathers.relevel()
        self._lay_out(exchanges, bucket_bytes=bucket_bytes, buckets=buckets, turns=turns)
        anew = frozenset(self._buckets.kept_by_owners(self.levels, self.rank, but=before))
        self._buckets.carry_over({name: tensor for name, tensor in held.items() if name not in anew})
        self._buckets.to_owners(self.levels, self.rank, self._of_island)
        self._buckets.adopt_views()

    def kept_by_owners(self) -> list[str]:
        """Return the names of states that one rank of an island keeps for all of it, residuals left out."""
        return self._buckets.kept_by_owners(self.levels, self.rank)

    def _of_island(self, mine: Tensor) -> Tensor:
        """Return the sum over this rank's island."""
        (total,) = self._pump.channel.start(Message((mine,), Collective.SUM, "island")).wait()
        return total

    @property
    def rank(self) -> int:
        return self._gathers.rank

    @property
    def ranks(self) -> int:
        return self._gathers.ranks

    @property
    def levels(self) -> ProcessGroups:
        return self._gathers.levels

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(self._buckets.params)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(s.layout for s in self._slots)

    @property
    def _slots(self) -> list[BucketState]:
        return self._buckets.slots

    @property
    def _window(self) -> StepContext:
        return self._gathers.window

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter name, in the order of the parameters.

        After `reduce` they are the mean over all ranks, of the part that this rank owns.
        """
        return self._buckets.gradients()

    def sent_gradients(self) -> dict[str, Tensor]:
        """Return this rank's own gradients of the step, as it gave them to the exchange; empty unless `keeps_sent`."""
        return self._buckets.sent()

    @property
    def is_exact(self) -> bool:
        """Return whether the mean on this rank is the weighted sum of all ranks' gradients, up to rounding."""
        return self._buckets.is_exact

    def flats(self) -> list[Tensor]:
        """Return the flat gradient buffers that are allocated now."""
        return self._buckets.flats()

    def begin(self, window: StepContext) -> None:
        """Start a step: gather every rank's weight without waiting for it."""
        self._watching = False
        self._sent_before, _ = self._pump.channel.meter.apart()
        self._gathers.begin(window)

    def open(self, window: StepContext) -> None:
        """Zero the gradients and declare the jobs of the step. Call `begin` where nobody has."""
        if window is not self._window:
            self.begin(window)
        for slot in self._slots:
            slot.open()
        self._touched.clear()
        if flats := self.flats():
            torch._foreach_zero_(flats)
        self._buckets.adopt_views()
        if window.level not in self._rounds:
            levels = self._meeting_at(window.level)
            pairs = [(self._method(s.exchange, window.level), s.layout) for s in self._slots]
            self._rounds[window.level] = [len(one.traffic(layout, levels, self.rank)) for one, layout in pairs]
        rounds, turns, tiers = self._rounds[window.level], self._turns, self._tiers
        if tiers is not None:  # where no other rank has these parameters there is nothing to wait for in turn
            rounds = rounds if self._averages else []
            turns = tuple(i for i in tiers.order for _ in range(rounds[i] + 1)) if rounds else ()
        self._exchanging = self._pump.begin(rounds, turns)

    def _meeting_at(self, level: str) -> ProcessGroups:
        """Return the process groups of an exchange among the ranks of `level` only."""
        return self.levels if level == "all" else self.levels.only(level)

    def _method(self, exchange: Exchange, level: str) -> Exchange:
        """Return the exchange among the ranks of `level`; dense for a single rank, which has nothing to compress."""
        if level == "all":
            return exchange
        return Dense() if len(self.levels.group(level, self.rank)) == 1 else exchange.for_island()

    def weights(self) -> Tensor:
        """Return the valid labels of every rank that votes in the step, (ranks,) float64, once all are gathered.

        They are 0 for the other ranks.
        """
        return self._gathers.weights()

    def labels(self) -> float:
        """Return the valid labels of all ranks whose gradients are averaged; wait for the last rank's."""
        return self._gathers.labels()

    def shares(self) -> Tensor:
        """Return every rank's share of the step's valid labels, (ranks,) float64.

        In a local step it is 0 for ranks of other islands.
        """
        return self._gathers.shares()

    def gather(self, row: tuple[float, ...], level: str = "") -> Tensor:
        """Return the `row` of every rank, or of those at `level`, (ranks, len(row)) float64.

        All of them must call it, and not between `open` and `reduce`.
        """
        return self._gathers.gather(row, level)

    def watch(self) -> None:
        """Mark the next backward as the step's last: a full bucket is sent from now on."""
        self._watching = True

    def reduce(self) -> None:
        """Send the remaining buckets (unused parameters fill none), wait for all means, write them to the gradients."""
        if self._tiers is not None:
            self._tiers.parameters.finish()
        for index, slot in enumerate(self._slots):
            if not slot.sent:
                self._send(index)
        self.timing.timed_wait(self._receive)
        self._watching = False

    def _receive(self) -> None:
        for index, slot in enumerate(self._slots):
            if self._tiers is None or (slot.is_kept and self._averages):
                slot.receive(self._exchanging.result(index))
            elif self._averages:
                self._exchanging.result(index)

    def agree(self, vote: StepVote) -> StepAgreement:
        """Exchange votes with the ranks whose gradients are averaged, and return the outcome."""
        # No number is counted by two ranks of the average.
        squared = self._buckets.norm_squared(self._window.level) if vote.squared is None else vote.squared
        report = GradientReport(squared, *self._buckets.not_finite(), self._buckets.idle(self._touched))
        return self._gathers.agree(vote, report, self.names, one_mean=self._buckets.is_whole)

    def sent_bytes(self) -> dict[str, int]:
        """Return the payload bytes this rank has sent since the step was opened, by link that carried any.

        Messages beside the steps count from the last call on, as they are sent at any time.
        """
        now, beside = self._pump.channel.meter.apart()
        sent = {link: count - self._sent_before.get(link, 0) for link, count in now.items()}
        sent |= {link: sent[link] + count - self._beside_before.get(link, 0) for link, count in beside.items()}
        self._beside_before = beside
        return {link: count for link, count in sent.items() if count}

    def commit(self) -> None:
        """Make the exchanges' new states current: the step took effect."""
        self._buckets.commit()

    def reject(self) -> None:
        """Drop the exchanges' new states: the step did not take effect."""
        self._buckets.reject()

    def handed_over(self) -> Iterator[tuple[Layout, Tensor]]:
        """Yield the mean of each bucket that tiers have not taken, and let it go: it belongs to the caller."""
        for slot in self._slots:
            if slot.bucket is not None and self._tiers is not None:
                flat, slot.bucket = slot.bucket.flat, None
                self._buckets.adopt(slot)
                yield slot.layout, flat

    def states(self) -> dict[str, Tensor]:
        """Return the state of all exchanges, by "path@parameter"."""
        return self._buckets.states()

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Load the tensors of `states`, and residuals as `adopt` carries them over; the rest starts anew.

        All ranks must call it.
        """
        self._buckets.restore(states)
        self._buckets.to_owners(self.levels, self.rank, self._of_island)

    def close(self) -> None:
        """Remove the hooks and the gradients from the parameters."""
        for hook in self._hooks:
            hook.remove()
        for param in self._buckets.params.values():
            param.grad = None

    def _allocate(self, name: str) -> None:
        """Allocate the bucket of a parameter that is about to get its first gradient."""
        for index in self._buckets.numbers_of[name]:
            self._there(index)

    def _there(self, index: int) -> Bucket:
        """Return the bucket, allocated at its first gradient or before it is sent."""
        slot = self._slots[index]
        if slot.bucket is None:
            if self._tiers is not None:
                slot.bucket = self._tiers.open_gradient(slot.layout, self._awaited)
            else:
                self.timing.timed_wait(self._make_room)
                slot.bucket = slot.layout.allocate()
            self._buckets.adopt(slot)
        return slot.bucket

    def _make_room(self) -> None:
        """Wait, before one more bucket is allocated, for those whose exchange can end without another one."""
        there = next((i for i, slot in enumerate(self._slots) if not slot.sent), len(self._slots))
        for index in range(there):
            if self._exchanging.needed[index] <= there:
                self._exchanging.result(index)

    def _awaited(self) -> str | None:
        """Return the first parameter of the bucket that full ones wait for, "" for none; None: a mean is under way.

        Raises what ended the exchange.
        """
        tiers = self._tiers
        assert tiers is not None
        for index in tiers.order if self._averages else ():
            slot = self._slots[index]
            if not slot.sent:
                return slot.layout.entries[0].name if any(one.sent for one in self._slots) else ""
            if not self._exchanging.has_ended(index):
                return None
        return ""

    def _count(self, name: str) -> None:
        self._touched.add(name)
        if not self._watching:
            return
        for index in self._buckets.numbers_of[name]:
            slot = self._slots[index]
            slot.waits -= 1
            if slot.waits == 0:
                self._send(index)

    def _send(self, index: int) -> None:
        slot, window, bucket = self._slots[index], self._window, self._there(index)
        share = self.shares()
        levels = self._meeting_at(window.level)
        at = ExchangeContext(self.rank, levels, share, (window.seed, window.step), window.lr, accounts=False)
        slot.sent = True
        # Of a rank without labels all gradients are zeros already.
        scale = window.scale * (float(share[self.rank]) or 1.0) if window.together else window.scale
        if scale != 1.0:
            bucket.flat.mul_(1.0 / scale)
        if self._keeps_sent:
            slot.own = Bucket(slot.layout, bucket.flat.clone())
        # The cheapest test of all numbers, for `agree`: a non-finite mean does not show which rank caused it.
        if not (self._is_alone and slot.exchange.traits.lossless):
            slot.total = bucket.flat.sum(dtype=torch.promote_types(bucket.flat.dtype, torch.float32))
        if self._tiers is not None and not self._averages:
            if at.share != 1.0:
                bucket.flat.mul_(at.share)
            if slot.is_kept:
                return
            slot.norms = self._tiers.take(
                slot.layout, bucket.flat, frozenset(e.name for e in slot.layout.entries) - self._touched
            )
            slot.bucket = None
            self._buckets.adopt(slot)
            return
        part = len(self.levels.group(window.level, self.rank)) / len(self.levels.group("all", self.rank))
        method = slot.run(bucket, self._method(slot.exchange, window.level), at, part=part)
        if self._tiers is not None and not slot.is_kept:
            marks = torch.tensor([e.name in self._touched for e in slot.layout.entries], dtype=torch.int32)
            self._exchanging.submit(index, self._buckets.taken(slot, method, marks, self._tiers))
            return
        if self._gives_back and not slot.is_kept:
            method = self._buckets.give_back(slot, method)
        self._exchanging.submit(index, method if levels is self.levels else sent_at(method, lambda _: window.level))


@dataclass(frozen=True, slots=True)
class _Hook:
    """Called by autograd when a parameter's gradient is complete."""

    replica: GradientReducer = field(repr=False)
    name: str = ""

    def __call__(self, param: Tensor) -> None:
        self.replica._count(self.name)


@dataclass(frozen=True, slots=True)
class _FirstHook:
    """Called by autograd before it adds to a parameter's gradient."""

    replica: GradientReducer = field(repr=False)
    name: str = ""

    def __call__(self, gradient: Tensor) -> None:
        self.replica._allocate(self.name)


def _watch(param: Tensor, hook: _Hook) -> RemovableHandle:
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]
