"""Gradient buckets of the trained parameters: the memory in which their gradients lie, and each bucket's exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel import Channel
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, Rounds
from gossamer.exchange import Exchange, compile_kernels
from gossamer.exchange.dense import Dense
from gossamer.recipe import ParameterRules
from gossamer.spec.method_config import Exchanges
from gossamer.sync import buckets_of

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
    tail: Tensor | None = None  # (1 + parameters,)
    pending: ExchangeState | None = None
    waits: int = 0
    sent: bool = False

    @property
    def latest(self) -> ExchangeState:
        """Return the exchange's state after the last pass."""
        return self.state if self.pending is None else self.pending

    @property
    def has_state(self) -> bool:
        """Return whether the exchange carries a state from step to step."""
        return any(True for _ in self.state.flatten())

    def summed(self) -> Rounds:
        """Sum the bucket and its tail over all ranks, in place."""
        (found,) = yield Message((self.whole,), Collective.SUM)
        if found.data_ptr() != self.whole.data_ptr():
            self.whole.copy_(found)
        return Outcome(self.bucket.flat, None, self.latest)


class LoopBuckets:
    """The buckets of the trained parameters `params`, in the order in which they are sent."""

    def __init__(self, channel: Channel, exchanges: Exchanges, bucket_bytes: int) -> None:
        self._channel = channel
        self._rules, self._bucket_bytes = ParameterRules.read(exchanges, key="exchange"), bucket_bytes
        self.slots: list[GradientBucket] = []
        self.params: dict[str, nn.Parameter] = {}
        self._planned: tuple[tuple[str, ...], ...] = ()  # the parameters of each bucket, where these are chosen
        self.turns: tuple[int, ...] = ()  # the bucket of each turn of the communication thread; empty: not chosen
        self.remembers = False  # whether an exchange carries a state from step to step
        self.rounds: list[int] = []  # messages of each bucket

    def add(self, params: Mapping[str, nn.Parameter]) -> None:
        """Append buckets for the parameters behind the existing buckets."""
        exchanges = {name: self._rules.of(name) for name in params}
        found = buckets_of(params, exchanges, bucket_bytes=self._bucket_bytes, named=self._planned)
        for layout, exchange in found if self._planned else _without_small(found, params):
            exchange.check(layout, self._channel.levels)
            self.slots.append(_bucket(layout, exchange))
        self.params |= params
        self._index = {e.name: i for i, slot in enumerate(self.slots) for e in slot.layout.entries}
        self._place = {name: index for index, name in enumerate(self.params)}
        self.remembers = any(slot.has_state for slot in self.slots)
        levels, rank = self._channel.levels, self._channel.rank
        self.rounds = [len(s.exchange.traffic(s.layout, levels, rank)) for s in self.slots]

    def rebuild(self, exchanges: Exchanges, buckets: tuple[tuple[str, ...], ...], turns: tuple[int, ...]) -> None:
        """Put all parameters into `buckets`, which hold the names of each, with other exchanges."""
        self._rules = ParameterRules.read(exchanges, key="exchange")
        self._planned, self.turns = buckets, turns
        self.slots = []  # `.grad` tensors no longer belong to a bucket
        self.add(self.params)

    def index_of(self, name: str) -> int:
        """Return the index of the bucket that holds a parameter's gradient."""
        return self._index[name]

    def slot_of(self, name: str) -> GradientBucket:
        """Return the bucket that holds a parameter's gradient."""
        return self.slots[self._index[name]]

    def is_view(self, name: str, grad: Tensor | None) -> bool:
        """Return whether `grad` is the parameter's own place in its bucket."""
        return grad is not None and grad.data_ptr() == self.slot_of(name).views[name].data_ptr()

    def marks(self, names: Iterable[str]) -> Tensor:
        """Return a mark for each parameter, (parameters,): 1 for those in `names`."""
        marks = torch.zeros(len(self.params), dtype=torch.uint8)
        for name in names:
            marks[self._place[name]] = 1
        return marks

    def commit(self) -> None:
        """Make the pending states of the exchanges the current ones."""
        for slot in self.slots:
            slot.state, slot.pending = slot.latest, None

    def reject(self) -> None:
        """Drop the pending states of the exchanges."""
        for slot in self.slots:
            slot.pending = None


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
    return GradientBucket(layout, exchange, exchange.init(layout), bucket, views, flat, behind)
