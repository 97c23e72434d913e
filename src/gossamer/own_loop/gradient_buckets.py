"""Gradient buckets of the trained parameters: the memory in which their gradients lie, and each bucket's exchange.

An exchange that keeps a state from step to step has buckets of one optimizer's parameters alone: the state is committed
by a step of that optimizer, and dropped where its step is rejected. So has a lossy one, whose mean may hide that a
rank's gradients are not finite: that rejects the step of their optimizer, and of no other.

A user may keep what `.grad` was (`kept = [p.grad for p in params]; optimizer.zero_grad()`). In torch that tensor stays
as it is, so a bucket of which a tensor is kept is left to it: the next pass fills a copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm.bucket import Bucket, Layout, sum_dtype
from gossamer.comm.channel import Channel
from gossamer.comm.message import Collective, ExchangeContext, ExchangeState, Message, Outcome, Rounds
from gossamer.exchange import Exchange, compile_kernels, has_state, is_residual
from gossamer.exchange.dense import Dense
from gossamer.own_loop.trained_parameters import TrainedParameters
from gossamer.recipe import ParameterRules
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges
from gossamer.sync import buckets_of

HAD, HIDDEN = 1, 2  # marks of a parameter's gradient on a rank, the larger the more telling
_SMALL_BYTES = 256 << 10  # below this, a message's latency costs more than its bytes


@dataclass(slots=True)
class GradientBucket:
    """One gradient bucket. `pending`: the exchange's state after the passes since the last step, if there were any.

    `tail`: extra elements behind the gradients of a bucket that is only summed: this rank's loss denominator, and for
    every parameter whether it had a gradient. So the sum of gradients times denominators carries its own divisor, and
    the bucket can be sent before the other ranks' rows are known. None for exchanges that do more than a sum.
    """

    layout: Layout
    exchange: Exchange
    state: ExchangeState
    bucket: Bucket
    views: dict[str, Tensor]
    whole: Tensor  # (bucket and tail,)
    is_apart: bool  # whether it may hold parameters of one optimizer alone
    tail: Tensor | None = None  # (1 + parameters,)
    pending: ExchangeState | None = None
    waits: int = 0
    sent: bool = False
    own: Tensor | None = None  # () the sum of this rank's own gradients since the last step
    references: int = 0  # to the memory, where only this bucket has tensors in it

    def __post_init__(self) -> None:
        self.references = _references(self.whole)

    @property
    def latest(self) -> ExchangeState:
        """Return the exchange's state after the last pass."""
        return self.state if self.pending is None else self.pending

    @property
    def has_state(self) -> bool:
        """Return whether the exchange carries a state from step to step."""
        return any(True for _ in self.state.flatten())

    def open(self) -> None:
        """Prepare for the gradients of a pass."""
        self.waits, self.sent = len(self.layout.entries), False
        if self.pending is None:
            self.own = None

    def is_kept(self, grads: Iterable[Tensor | None]) -> bool:
        """Return whether there are tensors in the bucket's memory besides its own and `grads`: the user keeps them."""
        found = _references(self.whole) - self.references
        if found <= 0:
            return False
        start = self.whole.untyped_storage().data_ptr()
        strided = [one for one in grads if one is not None and one.layout == torch.strided]
        return found > len({id(one) for one in strided if one.untyped_storage().data_ptr() == start})

    def renew(self) -> None:
        """Leave the memory to the tensors that the user keeps, and go on with a copy of it."""
        self.whole = self.whole.clone()
        self.bucket = Bucket(self.layout, self.whole[: self.layout.numel])
        self.views = dict(self.bucket.slices())
        self.tail = None if self.tail is None else self.whole[self.layout.numel :]
        self.references = _references(self.whole)

    def add_own(self) -> None:
        """Count in this rank's own gradients of a pass, before they are exchanged."""
        total = self.bucket.flat.sum(dtype=sum_dtype(self.layout.dtype))  # in half it would overflow
        self.own = total if self.own is None else self.own + total

    @property
    def hides(self) -> bool:
        """Return whether this rank gave a number that is not finite to an exchange that may not send it."""
        return self.is_apart and self.own is not None and not bool(torch.isfinite(self.own))

    def summed(self) -> Rounds:
        """Sum the bucket and its tail over all ranks, in place."""
        (found,) = yield Message((self.whole,), Collective.SUM)
        if found.data_ptr() != self.whole.data_ptr():
            self.whole.copy_(found)
        return Outcome(self.bucket.flat, None, self.latest)

    def exchanged(self, at: ExchangeContext, frozen: Collection[str]) -> Rounds:
        """Run the exchange. What error feedback owes the parameters in `frozen` is kept until they are unfrozen."""
        before = self.latest
        if not frozen or not self.has_state:
            return (yield from self.exchange.run(self.bucket, before, at))
        out = yield from self.exchange.run(self.bucket, _owing(before, None, self.layout, frozen), at)
        return replace(out, state=_owing(out.state, before, self.layout, frozen))


class LoopBuckets:
    """The buckets of the trained parameters `params`, in the order in which they are sent."""

    def __init__(self, channel: Channel, trained: TrainedParameters, exchanges: Exchanges, bucket_bytes: int) -> None:
        self._channel, self._trained = channel, trained
        self._rules, self._bucket_bytes = ParameterRules.read(exchanges, key="exchange"), bucket_bytes
        self.slots: list[GradientBucket] = []
        self.params: dict[str, nn.Parameter] = {}
        self._planned: tuple[tuple[str, ...], ...] = ()  # the parameters of each bucket, where these are chosen
        self.turns: tuple[int, ...] = ()  # the bucket of each turn of the communication thread; empty: not chosen
        self.remembers = False  # whether an exchange carries a state from step to step
        self.rounds: list[int] = []  # messages of each bucket

    def add(self, params: Mapping[str, nn.Parameter]) -> None:
        """Append buckets for the parameters behind the existing buckets."""
        for layout, exchange in self._laid_out(params):
            exchange.check(layout, self._channel.levels)
            self.slots.append(_bucket(layout, exchange))
        self.params |= params
        self._index = {e.name: i for i, slot in enumerate(self.slots) for e in slot.layout.entries}
        self._place = {name: index for index, name in enumerate(self.params)}
        self.remembers = any(slot.has_state for slot in self.slots)
        levels, rank = self._channel.levels, self._channel.rank
        self.rounds = [len(s.exchange.traffic(s.layout, levels, rank)) for s in self.slots]

    def _laid_out(self, params: Mapping[str, nn.Parameter]) -> list[tuple[Layout, Exchange]]:
        """Return the buckets of `params` and the exchange of each, in the order in which they are sent."""
        exchanges = {name: self._rules.of(name) for name in params}
        found: list[tuple[Layout, Exchange]] = []
        for part in self._apart(params, exchanges):
            some = buckets_of(part, exchanges, bucket_bytes=self._bucket_bytes, named=self._planned)
            found += some if self._planned else _without_small(some, part)
        order = [name for names in self._planned for name in names] or [*params][::-1]
        place = {name: index for index, name in enumerate(order)}
        return sorted(found, key=lambda one: max(place.get(entry.name, len(place)) for entry in one[0].entries))

    def _apart(
        self, params: Mapping[str, nn.Parameter], exchanges: Mapping[str, Exchange]
    ) -> list[dict[str, nn.Parameter]]:
        """Return the parameters in the parts that no bucket may mix: by their optimizers where these must be apart."""
        movers, nobody = self._trained.movers(), frozenset[int]()
        kinds = {one: _is_apart(one) for one in set(exchanges.values())}
        apart = {name for name in params if kinds[exchanges[name]]}
        if len({movers.get(name, nobody) for name in apart}) < 2:
            return [dict(params)]
        parts: dict[frozenset[int] | None, dict[str, nn.Parameter]] = {}
        for name, param in params.items():
            parts.setdefault(movers.get(name, nobody) if name in apart else None, {})[name] = param
        return list(parts.values())

    def rebuild(self, exchanges: Exchanges, buckets: tuple[tuple[str, ...], ...], turns: tuple[int, ...]) -> None:
        """Put all parameters into `buckets`, which hold the names of each, with other exchanges.

        A bucket of two optimizers' parameters becomes two where these must be apart; then `turns` has no use.
        """
        self._rules = ParameterRules.read(exchanges, key="exchange")
        self._planned = buckets
        self.slots = []  # `.grad` tensors no longer belong to a bucket
        self.add(self.params)
        self.turns = turns if len(self.slots) == len(buckets) else ()

    def index_of(self, name: str) -> int:
        """Return the index of the bucket that holds a parameter's gradient."""
        return self._index[name]

    def slot_of(self, name: str) -> GradientBucket:
        """Return the bucket that holds a parameter's gradient."""
        return self.slots[self._index[name]]

    def is_view(self, name: str, grad: Tensor | None) -> bool:
        """Return whether `grad` is the parameter's own place in its bucket."""
        return grad is not None and grad.data_ptr() == self.slot_of(name).views[name].data_ptr()

    def place(self, name: str) -> Tensor:
        """Return a tensor that is the parameter's place in its bucket, to be its `.grad`: the one that is so already,
        or a new one.

        It is never one of the bucket's own, whose references would not tell that the user keeps it. Where that takes no
        other order of the elements it has the parameter's strides, as torch's gradients do.
        """
        param, view = self.params[name], self.slot_of(name).views[name]
        if param.grad is not None and self.is_view(name, param.grad):
            return param.grad
        alike = param.shape == view.shape and param.is_contiguous()
        return view.as_strided(view.shape, param.stride()) if alike else view.view(view.shape)

    def leave_kept(self, held: Collection[str]) -> None:
        """Leave the memory of buckets to the tensors in it that the user keeps, before a pass writes to them.

        `held`: parameters whose `.grad` waits for others of a group; it moves to the new memory.
        """
        for slot in self.slots:
            names = [entry.name for entry in slot.layout.entries]
            if slot.is_kept(self.params[name].grad for name in names):
                moved = [name for name in names if name in held and self.is_view(name, self.params[name].grad)]
                slot.renew()
                for name in moved:
                    self.params[name].grad = self.place(name)

    def marks(self, names: Iterable[str]) -> Tensor:
        """Return a mark for each parameter, (parameters,): for those in `names` HAD, or HIDDEN if the gradients of its
        bucket are not all finite and the exchange may hide that from the other ranks.
        """
        kinds = [HIDDEN if slot.hides else HAD for slot in self.slots]
        marks = torch.zeros(len(self.params), dtype=torch.uint8)
        for name in names:
            marks[self._place[name]] = kinds[self._index[name]]
        return marks

    def had(self, marks: Tensor) -> dict[str, bool]:
        """Return for each parameter whether any rank has a gradient for it, given the largest of all ranks' `marks`; a
        mean that hides that a rank's gradients are not finite is made nan, as in one process.
        """
        found = dict(zip(self.params, marks.tolist(), strict=True))
        for name in (name for name, mark in found.items() if mark == HIDDEN):
            self.slot_of(name).views[name].fill_(math.nan)
        return {name: bool(mark) for name, mark in found.items()}

    def own_sums(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the sums of what this rank gave to the gradients of `optimizer` since its last step."""
        return [slot.own for slot in self._of(optimizer) if slot.own is not None]

    def check_apart(self, optimizer: Optimizer) -> None:
        """Raise BadInput if parameters of `optimizer` share a bucket that must be apart with those of another one, as
        they do if both came to their optimizers after the bucket was made.
        """
        movers = self._trained.movers()
        for slot in (one for one in self._of(optimizer) if one.is_apart):
            names = [entry.name for entry in slot.layout.entries if entry.name in movers]
            other = next((name for name in names if movers[name] != movers[names[0]]), None)
            if other is not None:
                raise bad_input(
                    wanted="parameters of one optimizer in each bucket of an exchange that is lossy or keeps a state",
                    got=f"{names[0]} and {other} in one bucket, given to different optimizers after gossamer.wrap",
                    do="give all parameters to their optimizers before gossamer.wrap, call gossamer.wrap again, or use "
                    "the exchange dense",
                    key="exchange",
                )

    def commit(self, optimizer: Optimizer) -> None:
        """Make the pending states of the exchanges of `optimizer`'s gradients the current ones."""
        for slot in self._of(optimizer):
            slot.state, slot.pending = slot.latest, None

    def reject(self, optimizer: Optimizer) -> None:
        """Drop the pending states of the exchanges of `optimizer`'s gradients."""
        for slot in self._of(optimizer):
            slot.pending = None

    def give_up(self, *, is_watched: bool) -> bool:
        """Drop the pending states of each optimizer whose gradients the user has all dropped or zeroed without a step;
        return whether there were any. `is_watched`: whether a step is being profiled, which takes note of that.
        """
        movers, nobody = self._trained.movers(), frozenset[int]()
        waiting: dict[frozenset[int], list[GradientBucket]] = {}
        for slot in self.slots:
            if slot.pending is not None:
                key = nobody.union(*(movers.get(entry.name, nobody) for entry in slot.layout.entries))
                waiting.setdefault(key, []).append(slot)
        dropped = [some for some in waiting.values() if not any(self._has_gradient(slot, is_watched) for slot in some)]
        for slots in dropped:
            for slot in slots:
                slot.pending = None
        return bool(dropped)

    def _has_gradient(self, slot: GradientBucket, is_watched: bool) -> bool:
        """Return whether the user has kept a gradient of a bucket; one of zeros is dropped where that matters."""
        grads, matters = [self.params[entry.name].grad for entry in slot.layout.entries], self.remembers or is_watched
        return any(grad is not None and (not matters or bool(grad.any())) for grad in grads)

    def _of(self, optimizer: Optimizer) -> list[GradientBucket]:
        """Return the buckets with gradients of parameters that `optimizer` moves."""
        place, movers, nobody = self._trained.place(optimizer), self._trained.movers(), frozenset[int]()
        return [slot for slot in self.slots if any(place in movers.get(e.name, nobody) for e in slot.layout.entries)]


def _references(tensor: Tensor) -> int:
    """Return how many tensors and others refer to the memory of `tensor`."""
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found


def _is_apart(exchange: Exchange) -> bool:
    """Return whether the buckets of an exchange may hold parameters of one optimizer alone."""
    return not exchange.traits.lossless or has_state(exchange)


def _owing(state: ExchangeState, other: ExchangeState | None, layout: Layout, names: Collection[str]) -> ExchangeState:
    """Return `state` with the residuals of the parameters `names` as in `other`; 0 for None."""
    tensors, others = dict(state.flatten()), dict(other.flatten()) if other is not None else {}
    for path, tensor in tensors.items():
        if not is_residual(path) or tensor.shape != (layout.numel,):
            continue
        owed = tensor.clone()
        for at in (slice(e.start, e.start + e.numel) for e in layout.entries if e.name in names):
            owed[at] = others[path][at] if others else 0.0
        tensors[path] = owed
    return state.replace(tensors)


def _without_small(
    buckets: Sequence[tuple[Layout, Exchange]], params: Mapping[str, Tensor]
) -> Iterator[tuple[Layout, Exchange]]:
    """Merge a bucket too small for its own message into the next one, if exchange, dtype and device are equal."""
    small: dict[str, Tensor] = {}
    for index, (layout, exchange) in enumerate(buckets):
        held = small | {entry.name: params[entry.name] for entry in layout.entries}
        after = buckets[index + 1] if index + 1 < len(buckets) else None
        is_alike = after is not None and (after[1], after[0].dtype, after[0].device) == (
            *(exchange, layout.dtype, layout.device),
        )
        if is_alike and sum(t.numel() * t.element_size() for t in held.values()) < _SMALL_BYTES:
            small = held
            continue
        yield Layout.of(held), exchange
        small = {}


def _bucket(layout: Layout, exchange: Exchange) -> GradientBucket:
    """Return a zeroed bucket, with a tail if its exchange is a plain sum."""
    compile_kernels(exchange, layout.device)
    is_sum = isinstance(exchange, Dense) and layout.dtype in (torch.float32, torch.float64)
    tail = 1 + len(layout.entries) if is_sum else 0
    flat = torch.zeros(layout.numel + tail, dtype=layout.dtype, device=layout.device)
    bucket = Bucket(layout, flat[: layout.numel])
    views, behind = dict(bucket.slices()), flat[layout.numel :] if is_sum else None
    return GradientBucket(layout, exchange, exchange.init(layout), bucket, views, flat, _is_apart(exchange), behind)
