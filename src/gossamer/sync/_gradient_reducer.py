"""The gradient reducer of one rank: bucket gradients, average them during the backward pass, vote before the update.

A step is a transaction. Nothing that outlives it changes before `commit`: the buckets of gradients are overwritten in
the next step, and exchanges return new states. A step sends, in an order that all ranks know:
    weights     every rank's share of the batch, gathered while the forward pass runs
    buckets     one job each, as the exchange sends them, while backward runs
    agreement   is it finite, complete and the same step everywhere? Then, where ranks differ in it, who had no gradient
All three run among the ranks whose gradients are averaged: in a local step, those of one island.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gossamer.comm.bucket import Bucket, Layout, partition
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import (
    Collective,
    ExchangeContext,
    ExchangeState,
    Message,
    Outcome,
    ProcessGroups,
    Rounds,
    sent_at,
)
from gossamer.exchange import Exchange, has_residual, is_residual
from gossamer.exchange.dense import Dense
from gossamer.ops.norm import global_norm_squared
from gossamer.spec.errors import WireMismatch, bad_input
from gossamer.sync._state_by_name import named, refilled

_MARKS = 2**48  # hashes of sets of idle parameters: the fraction of a vote whose integer part is a request


@dataclass(frozen=True, slots=True)
class StepContext:
    """The context of one step on its rank: step number, random seed, learning rate, valid labels, averaging level."""

    step: int
    seed: int
    lr: float
    weight: float  # valid labels of this rank
    scale: float = 1.0  # loss scale (fp16), divided out before gradients are encoded
    together: bool = False  # each loss was divided by the labels of all ranks that hold these parameters, not by mine
    level: str = "all"  # the ranks over which gradients are averaged


@dataclass(frozen=True, slots=True)
class StepVote:
    """The vote of one rank on a step before the update. `ask` is a small code for `stop` or `save` requests."""

    loss: float  # mean over this rank's valid labels
    ask: int = 0
    speaks: bool = True  # whether this rank computes the loss: with pipeline stages, the last one does
    squared: float | None = None  # its part of the squared norm, where no bucket holds the gradient
    beside: Tensor | None = None  # a tensor to gather with the votes, equal in shape and type on all ranks


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The outcome of the votes on a step: the same numbers on all ranks, or on those of one island."""

    finite: bool
    loss: float  # mean over all valid labels
    weight: float  # valid labels of all who voted
    norm: float  # of the mean gradient, over all stages; in a local step, of this island's
    ask: int  # the largest request
    bad_ranks: tuple[int, ...]
    idle: frozenset[str] = frozenset()  # parameters without a gradient on any rank: they are not updated
    beside: Tensor | None = None  # (voters, *shape): the tensors gathered with the votes


@dataclass(slots=True)
class _BucketState:
    """One bucket: its buffer, its exchange with the state, and the number of gradients it still waits for.

    With `gives_back`, `bucket` is allocated from the first gradient until it is sent, and `mean` (laid out as `mine`)
    from the end of the exchange until the next step.
    """

    layout: Layout
    exchange: Exchange
    state: ExchangeState
    bucket: Bucket | None
    mine: Layout  # layout of the part whose mean this rank receives
    mean: Bucket | None = None
    waits: int = 0
    sent: bool = False
    total: Tensor = field(default_factory=lambda: torch.zeros(()))  # of all numbers that this rank gave
    outcome: Outcome | None = None
    own: Bucket | None = None  # what this rank gave to the exchange, where that is kept

    @property
    def flats(self) -> list[Tensor]:
        """Return the buffer that is allocated, if any."""
        return [one.flat for one in (self.bucket or self.mean,) if one is not None]


@dataclass(slots=True)
class Timing:
    """The communication time of a step: `exposed_s`, seconds this rank waited for messages."""

    exposed_s: float = 0.0


class GradientReducer:
    """A reducer that buckets the gradients of one rank and averages them over ranks during backward (as DDP's Reducer).

    `params` are the trainable parameters by canonical name (tied ones once); with pipeline parallelism, those of this
    rank's stage. `exchange` averages their gradients: one for all, or one by parameter name. Each `.grad` becomes a
    view of a flat bucket, so autograd writes a gradient once and the exchange sends it from there. `counted_elsewhere`
    names the parameters whose squared norm another rank reports: tied weights of another stage, or rows that another
    island owns too. In a local step each island counts its own. `meets`: the level the exchange must serve, where it is
    not `all`; each StepContext names the level of its step. Raise BadInput where an exchange cannot serve its buckets
    or these process groups.

    `owned`: the part of a gradient whose mean this rank receives, where that is not all of it. `gives_back`: free the
    rest after the exchange, and allocate a bucket at its first gradient. At most as many buckets are pending as the
    order of messages needs, and backward waits for them. `keeps_sent`: keep a copy of this rank's input to the exchange
    until the next step.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        exchange: Exchange | Mapping[str, Exchange],
        pump: CommThread,
        *,
        bucket_bytes: int,
        counted_elsewhere: frozenset[str] = frozenset(),
        meets: str = "all",
        owned: Callable[[str, Tensor], Tensor] | None = None,
        gives_back: bool = False,
        keeps_sent: bool = False,
    ) -> None:
        self.meets, self._gives_back, self._keeps_sent = meets, gives_back, keeps_sent
        self._is_whole, self._owned = owned is None, owned or _all_of_it
        self.rank = pump.channel.rank
        self.levels = pump.channel.levels
        self.ranks = len(self.levels.everyone)
        self._counted_elsewhere = counted_elsewhere
        self.timing = Timing()
        self._pump = pump
        self._params = dict(params)
        self._slots: list[_BucketState] = []
        self._lay_out(
            dict.fromkeys(params, exchange) if isinstance(exchange, Exchange) else exchange, bucket_bytes=bucket_bytes
        )
        self._watching = False
        self._touched: set[str] = set()  # parameters that have a gradient in this step
        self._sent_before: dict[str, int] = {}
        self._beside_before: dict[str, int] = {}
        self._weights: Tensor | None = None
        self._weighing = self._exchanging = CommStep(())
        self._window = StepContext(0, 0, 0.0, 0.0)
        self._adopt_views()
        self._hooks = [_watch(p, _Hook(self, name)) for name, p in params.items()]
        if gives_back:
            self._hooks += [p.register_hook(_FirstHook(self, name)) for name, p in params.items()]  # type: ignore[no-untyped-call]

    def _lay_out(self, exchanges: Mapping[str, Exchange], *, bucket_bytes: int) -> None:
        cut = buckets_of(self._params, exchanges, bucket_bytes=bucket_bytes)
        for layout, one in cut:
            self._method(one, self.meets).check(layout, self._meeting_at(self.meets))
        self._slots.clear()  # the old buffers go before the new ones come
        self._slots.extend(self._slot(layout, one) for layout, one in cut)
        self._rounds: dict[str, list[int]] = {}  # messages of every bucket's exchange, by the level of the average
        self._slot_of = {e.name: i for i, s in enumerate(self._slots) for e in s.layout.entries}

    def _slot(self, layout: Layout, exchange: Exchange) -> _BucketState:
        mine = Layout.of({e.name: self._owned(e.name, self._params[e.name]) for e in layout.entries})
        bucket = None if self._gives_back else layout.allocate()
        return _BucketState(layout, exchange, exchange.init(layout), bucket, replace(mine, dtype=layout.dtype))

    def adopt(self, exchanges: Mapping[str, Exchange], *, bucket_bytes: int) -> None:
        """Replace the exchanges between two steps and carry their state over, by parameter name and size.

        Residuals ("e") are carried over also where they are nested at another depth; all other state starts anew. Raise
        BadInput, changing nothing, where an exchange cannot serve, or keeps no residual where there is one now.
        """
        self._check_owed(exchanges)
        held = self.states()
        owed = {_last(n): t for n, t in held.items() if is_residual(n)}
        self.levels = self._pump.channel.levels
        self._lay_out(exchanges, bucket_bytes=bucket_bytes)
        fresh = self.states()
        there = {n: held.get(n, owed.get(_last(n), t)) for n, t in fresh.items()}
        self.restore({n: there[n] if there[n].shape == t.shape else t for n, t in fresh.items()})
        self._adopt_views()

    def _check_owed(self, exchanges: Mapping[str, Exchange]) -> None:
        for slot in self._slots:
            if not has_residual(slot.exchange):
                continue
            for name in (e.name for e in slot.layout.entries):
                if not has_residual(exchanges[name]):
                    raise bad_input(
                        wanted=f"an exchange for {name} that goes on with its residual, as feedback does",
                        got=repr(exchanges[name]),
                        do="put error_feedback around it: around dense, it pays all at once",
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(self._params)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(s.layout for s in self._slots)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter name, in the order of the parameters.

        After `reduce` they are the mean over all ranks, of the part that this rank owns.
        """
        views = {name: view for s in self._slots for name, view in self._known(s)}
        return {name: views[name] for name in self._params}

    def _known(self, slot: _BucketState) -> Iterator[tuple[str, Tensor]]:
        if slot.bucket is not None:
            return ((name, self._owned(name, view)) for name, view in slot.bucket.slices())
        assert slot.mean is not None, "gradients that are given back are there after `reduce`"
        return slot.mean.slices()

    def sent_gradients(self) -> dict[str, Tensor]:
        """Return this rank's own gradients of the step, as it gave them to the exchange; empty unless `keeps_sent`."""
        return {name: view for s in self._slots if s.own is not None for name, view in s.own.slices()}

    @property
    def is_exact(self) -> bool:
        """Return whether the mean on this rank is the weighted sum of all ranks' gradients, up to rounding."""
        return self._is_whole and all(slot.exchange.traits.lossless for slot in self._slots)

    def flats(self) -> list[Tensor]:
        """Return the flat gradient buffers that are allocated now."""
        return [flat for s in self._slots for flat in s.flats]

    def begin(self, window: StepContext) -> None:
        """Start a step: gather every rank's weight without waiting for it."""
        self._window, self._weights, self._watching = window, None, False
        self._sent_before, _ = self._pump.channel.meter.apart()
        self._weighing = self._pump.begin((1,))
        mine = torch.tensor((window.weight,), dtype=torch.float64)
        self._weighing.submit(0, self._gather(mine, self._who(window)))

    def open(self, window: StepContext) -> None:
        """Zero the gradients and declare the jobs of the step. Call `begin` where nobody has."""
        if window is not self._window:
            self.begin(window)
        for slot in self._slots:
            slot.waits, slot.sent, slot.outcome, slot.mean = len(slot.layout.entries), False, None, None
        self._touched.clear()
        if flats := self.flats():
            torch._foreach_zero_(flats)
        self._adopt_views()
        if window.level not in self._rounds:
            levels = self._meeting_at(window.level)
            pairs = [(self._method(s.exchange, window.level), s.layout) for s in self._slots]
            self._rounds[window.level] = [len(one.traffic(layout, levels, self.rank)) for one, layout in pairs]
        self._exchanging = self._pump.begin(self._rounds[window.level])

    def _meeting_at(self, level: str) -> ProcessGroups:
        """Return the process groups of an exchange among the ranks of `level` only."""
        return self.levels if level == "all" else self.levels.only(level)

    def _method(self, exchange: Exchange, level: str) -> Exchange:
        """Return the exchange among the ranks of `level`; dense for a single rank, which has nothing to compress."""
        if level == "all":
            return exchange
        return Dense() if len(self.levels.group(level, self.rank)) == 1 else exchange.for_island()

    def labels(self) -> float:
        """Return the valid labels of all ranks whose gradients are averaged; wait for the last rank's."""
        return float(self.weights()[list(self.levels.group(self._window.level, self.rank))].sum())

    def shares(self) -> Tensor:
        """Return every rank's share of the step's valid labels, (ranks,) float64.

        In a local step it is 0 for ranks of other islands.
        """
        weights, members = self.weights(), list(self.levels.group(self._window.level, self.rank))
        total = weights[members].sum()
        return weights / total if total > 0 else torch.full_like(weights, 1 / len(members))

    def watch(self) -> None:
        """Mark the next backward as the step's last: a full bucket is sent from now on."""
        self._watching = True

    def reduce(self) -> None:
        """Send the remaining buckets (unused parameters fill none), wait for all means, write them to the gradients."""
        for index, slot in enumerate(self._slots):
            if not slot.sent:
                self._send(index)
        began = time.perf_counter()
        for index, slot in enumerate(self._slots):
            slot.outcome = self._exchanging.result(index)
            if slot.bucket is None:
                slot.mean = Bucket(slot.mine, slot.outcome.mean)
            elif slot.outcome.mean.data_ptr() != slot.bucket.flat.data_ptr():
                slot.bucket.flat.copy_(slot.outcome.mean)
        self.timing.exposed_s += time.perf_counter() - began
        self._watching = False

    def agree(self, vote: StepVote) -> StepAgreement:
        """Exchange votes with the ranks whose gradients are averaged, and return the outcome."""
        weights = self.weights()
        squared = self._norm_squared() if vote.squared is None else vote.squared
        is_mine, is_hidden = self._not_finite()
        # The sign bit tells whose it is: where all learn the same mean, all have what one has given.
        squared = math.copysign(math.nan if is_hidden else squared, -1.0 if is_mine else 1.0)
        # A rank without labels has a weight of zero, and 0 * nan would still poison the mean.
        spoken = float(weights[self.rank]) if vote.speaks else 0.0
        idle = self._idle()
        ask = vote.ask + _mark(idle)
        mine = [float(self._window.step), squared, vote.loss * spoken if spoken else 0.0, spoken, ask]
        began = time.perf_counter()
        row, more = torch.tensor(mine, dtype=torch.float64), [] if vote.beside is None else [vote.beside]
        votes, *beside = self._gathered([row, *more], self._who(self._window))  # (voters, 5)
        self.timing.exposed_s += time.perf_counter() - began
        if not bool((votes[:, 0] == self._window.step).all()):
            steps = [int(s) for s in votes[:, 0].tolist()]
            raise WireMismatch(f"the ranks are at different steps, by rank: {steps}")
        sick = ~(torch.isfinite(votes[:, 1]) & torch.isfinite(votes[:, 2]))
        guilty = torch.signbit(votes[:, 1]) | ~torch.isfinite(votes[:, 2])  # they gave what the others got
        squares = votes[:, 1].abs()
        voters, groups = self.levels.everyone, self.levels.groups["all"]  # each group has one mean: a part of the model
        if self._window.level != "all":  # or a model of its own
            voters = self.levels.group(self._window.level, self.rank)
            groups = (voters,)
        firsts = [voters.index(group[0]) for group in groups]
        if not self._is_whole or vote.squared is not None:  # each speaks for its own part
            firsts = list(range(len(voters)))
        total = float(votes[:, 3].sum())
        return StepAgreement(
            finite=not bool(sick.any()),
            loss=float(votes[:, 2].sum()) / total if total else 0.0,
            weight=total,
            norm=math.sqrt(float(squares.max()) if bool(sick.any()) else float(squares[firsts].sum())),
            ask=int(votes[:, 4].max()),
            bad_ranks=_blamed(voters, sick, guilty),
            idle=self._idle_everywhere(idle, votes[[voters.index(rank) for rank in self._met()], 4] % 1),
            beside=beside[0] if beside else None,
        )

    def _idle(self) -> frozenset[str]:
        """Return the parameters without a gradient on this rank in the step, and without a residual in the mean."""
        none = frozenset(self._params) - self._touched
        for slot in self._slots if none else ():
            if any(True for _ in slot.state.flatten()):  # what it keeps from step to step it may give out now
                none -= {name for name, view in self._known(slot) if name in none and bool(view.any())}
        return none

    def _met(self) -> tuple[int, ...]:
        """Return the ranks whose gradients are averaged in the step, and that hold the same parameters."""
        return tuple(self.levels.group(self._window.level, self.rank))

    def _idle_everywhere(self, idle: frozenset[str], marks: Tensor) -> frozenset[str]:
        """Return the parameters that are idle on all ranks; gather their names only where the ranks' marks differ."""
        if bool((marks == marks[0]).all()):
            return idle
        bits = torch.tensor([name in idle for name in self._params], dtype=torch.uint8)
        (rows,) = self._gathered([bits], self._window.level)  # (ranks, parameters)
        everywhere = rows.view(-1, len(bits)).all(0).tolist()
        return frozenset(name for name, alone in zip(self._params, everywhere, strict=True) if alone)

    def gather(self, row: tuple[float, ...], level: str = "") -> Tensor:
        """Return the `row` of every rank, or of those at `level`, (ranks, len(row)) float64.

        All of them must call it, and not between `open` and `reduce`.
        """
        return self._gathered([torch.tensor(row, dtype=torch.float64)], level or self.levels.whole)[0]

    def _gathered(self, mine: Sequence[Tensor], level: str) -> list[Tensor]:
        """Gather each tensor over the ranks at `level`, all of them at once, and return them stacked."""
        step = self._pump.begin((1,) * len(mine))
        for job, tensor in enumerate(mine):
            step.submit(job, self._gather(tensor, level))
        return [step.result(job).mean for job in range(len(mine))]

    def _gather(self, mine: Tensor, level: str) -> Generator[Message, tuple[Tensor, ...], Outcome]:
        (rows,) = yield Message((mine,), Collective.GATHER, level)
        return Outcome(rows, None, ExchangeState())

    def _not_finite(self) -> tuple[bool, bool]:
        """Return whether this rank's input was non-finite, and whether a lossy exchange might have hidden that."""
        bad = [slot for slot in self._slots if not math.isfinite(slot.total.item())]
        return bool(bad), not all(slot.exchange.traits.lossless for slot in bad)

    def _who(self, window: StepContext) -> str:
        """Return the level of the ranks that vote in a step."""
        return self.levels.whole if window.level == "all" else window.level

    def _norm_squared(self) -> float:
        """Return the squared norm of this rank's gradients; no number is counted by two ranks of the average."""
        counted: list[Tensor] = []
        elsewhere = self._counted_elsewhere if self._window.level == "all" else frozenset()
        for slot in self._slots:
            mine = [view for name, view in self._known(slot) if name not in elsewhere]
            counted += slot.flats if self._is_whole and len(mine) == len(slot.layout.entries) else mine
        return global_norm_squared(counted).item() if counted else 0.0

    def sent_bytes(self) -> dict[str, int]:
        """Return the payload bytes this rank has sent since the step was opened, by link.

        Messages beside the steps count from the last call on, as they are sent at any time.
        """
        now, beside = self._pump.channel.meter.apart()
        sent = {link: count - self._sent_before.get(link, 0) for link, count in now.items()}
        sent |= {link: sent[link] + count - self._beside_before.get(link, 0) for link, count in beside.items()}
        self._beside_before = beside
        return sent

    def commit(self) -> None:
        """Make the exchanges' new states current: the step took effect."""
        for slot in self._slots:
            if slot.outcome is not None:
                slot.state, slot.outcome = slot.outcome.state, None

    def reject(self) -> None:
        """Drop the exchanges' new states: the step did not take effect."""
        for slot in self._slots:
            slot.outcome = None

    def states(self) -> dict[str, Tensor]:
        """Return the state of all exchanges, by "path@parameter"."""
        found: dict[str, Tensor] = {}
        for slot in self._slots:
            found.update(named(slot.layout, slot.state))
        return found

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Load the tensors of `states`; the buckets may differ as long as all state has its parameter's shape."""
        for slot in self._slots:
            slot.state = refilled(slot.layout, slot.state, states)

    def close(self) -> None:
        """Remove the hooks and the gradients from the parameters."""
        for hook in self._hooks:
            hook.remove()
        for param in self._params.values():
            param.grad = None

    def _adopt_views(self) -> None:
        for slot in self._slots:
            self._adopt(slot)

    def _adopt(self, slot: _BucketState) -> None:
        views = dict(slot.bucket.slices()) if slot.bucket is not None else {}
        for entry in slot.layout.entries:
            self._params[entry.name].grad = views.get(entry.name)

    def _there(self, index: int) -> Bucket:
        """Return the bucket, allocated at its first gradient or before it is sent."""
        slot = self._slots[index]
        if slot.bucket is None:
            self._make_room()
            slot.bucket = slot.layout.allocate()
            self._adopt(slot)
        return slot.bucket

    def _make_room(self) -> None:
        """Wait, before one more bucket is allocated, for those whose exchange can end without another one."""
        there = next((i for i, slot in enumerate(self._slots) if not slot.sent), len(self._slots))
        began = time.perf_counter()
        for index in range(there):
            if self._exchanging.needed[index] <= there:
                self._exchanging.result(index)
        self.timing.exposed_s += time.perf_counter() - began

    def _count(self, name: str) -> None:
        self._touched.add(name)
        if not self._watching:
            return
        index = self._slot_of[name]
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
        if self.ranks > 1 or not slot.exchange.traits.lossless:
            slot.total = bucket.flat.sum(dtype=torch.promote_types(bucket.flat.dtype, torch.float32))
        one = self._method(slot.exchange, window.level)
        if one is slot.exchange:
            method = one.run(bucket, slot.state, at)
        else:
            method = _keeping(slot.state, one.run(bucket, ExchangeState(), at))
        if self._gives_back:
            method, slot.bucket = self._own_part(slot, method), None
            self._adopt(slot)
        self._exchanging.submit(index, method if levels is self.levels else sent_at(method, lambda _: window.level))

    def _own_part(self, slot: _BucketState, method: Rounds) -> Rounds:
        """Run `method` and return this rank's part of the mean only."""
        outcome = yield from method
        mean = slot.mine.allocate()
        for (name, view), (_, own) in zip(Bucket(slot.layout, outcome.mean).slices(), mean.slices(), strict=True):
            own.copy_(self._owned(name, view))
        return replace(outcome, mean=mean.flat)

    def weights(self) -> Tensor:
        """Return the valid labels of every rank that votes in the step, (ranks,) float64, once all are gathered.

        They are 0 for the other ranks.
        """
        if self._weights is None:
            began = time.perf_counter()
            told = self._weighing.result(0).mean.flatten()
            self._weights = torch.zeros(self.ranks, dtype=torch.float64)  # (ranks,)
            self._weights[list(self.levels.group(self._who(self._window), self.rank))] = told
            self.timing.exposed_s += time.perf_counter() - began
        return self._weights


def _mark(idle: frozenset[str]) -> float:
    """Return a number below 1 that differs for every set of parameters; 0 for the empty set."""
    if not idle:
        return 0.0
    said = hashlib.blake2b("\0".join(sorted(idle)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(said, "big") % (_MARKS - 1) + 1) / _MARKS


def _blamed(voters: Sequence[int], sick: Tensor, guilty: Tensor) -> tuple[int, ...]:
    """Return the ranks that gave non-finite numbers; if none can be named, those that received them."""
    if not bool(sick.any()):
        return ()
    return tuple(voters[i] for i in torch.nonzero(guilty if bool(guilty.any()) else sick).flatten().tolist())


def buckets_of(
    params: Mapping[str, Tensor], exchanges: Mapping[str, Exchange], *, bucket_bytes: int
) -> list[tuple[Layout, Exchange]]:
    """Return the buckets in the order backward fills them, each with its exchange; none mixes two exchanges."""
    groups: dict[Exchange, dict[str, Tensor]] = {}
    for name, param in params.items():
        groups.setdefault(exchanges[name], {})[name] = param
    found = [(layout, one) for one, held in groups.items() for layout in partition(held, bucket_bytes=bucket_bytes)]
    position = {name: i for i, name in enumerate(params)}
    return sorted(found, key=lambda item: -min(position[e.name] for e in item[0].entries))


def _keeping(state: ExchangeState, method: Rounds) -> Rounds:
    """Run a method without state in place of one that has `state`, which is kept."""
    out = yield from method
    return replace(out, state=state)


def _last(path: str) -> str:
    """Return "e@name" of "0/1/e@name"."""
    state, at, name = path.partition("@")
    return f"{state.rpartition('/')[2]}{at}{name}"


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
        self.replica._there(self.replica._slot_of[self.name])


def _all_of_it(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _watch(param: Tensor, hook: _Hook) -> RemovableHandle:
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]
