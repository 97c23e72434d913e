"""A replica's end of a step: buckets that fill while backward runs, the exchange, and the agreement before the update.

A step is a transaction. Nothing that outlives it moves before `commit`: gradients lie in buckets that are rewritten
next time, exchange states are handed back new. What crosses the wire, in the order all ranks know:
    weights     every rank's share of the batch, gathered while the forward pass runs
    buckets     as the exchange sends them, one job each, while backward runs
    agreement   is it finite, complete and the same step everywhere? Then, where ranks differ in it, who had no gradient
All three among the ranks whose gradients meet in it: where islands are apart, a step is each island's own affair.
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

_MARKS = 2**48  # of sets of parameters without a gradient, told beside a request, which is a small whole number


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step as its rank sees it: which, with what random key and rate, and how much of the batch is mine."""

    step: int
    seed: int
    lr: float
    weight: float  # valid labels of this rank
    scale: float = 1.0  # what the loss was multiplied with (fp16): divided out before anything is encoded
    together: bool = False  # each loss was divided by the labels of all ranks that hold these parameters, not by mine
    level: str = "all"  # whose gradients meet in it


@dataclass(frozen=True, slots=True)
class StepVote:
    """What one rank says about a step before the update. `ask` is a small code for `stop` or `save` requests."""

    loss: float  # mean over this rank's valid labels
    ask: int = 0
    speaks: bool = True  # whether the loss is this rank's to know: of a model in stages, the last one's
    squared: float | None = None  # its part of the norm's square, where the gradient lies in no bucket
    beside: Tensor | None = None  # what else all ranks are to know, alike in shape and type


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """What all ranks know after they voted, or those of an island: the same numbers on each of them."""

    finite: bool
    loss: float  # mean over all valid labels
    weight: float  # valid labels of all who voted
    norm: float  # of the mean gradient, of all stages; where only an island's gradients meet, of this one's
    ask: int  # the largest request
    bad_ranks: tuple[int, ...]
    idle: frozenset[str] = frozenset()  # parameters that nobody had a gradient for: they are to stay as they are
    beside: Tensor | None = None  # (voters, *shape): what came with the votes


@dataclass(slots=True)
class _BucketState:
    """One bucket: its buffer, its exchange with the state, and how many gradients it still waits for.

    Where buffers are given back, `bucket` is there from the first gradient until it is sent, and `mean` (laid out as
    `mine`) from the end of the exchange until the next step.
    """

    layout: Layout
    exchange: Exchange
    state: ExchangeState
    bucket: Bucket | None
    mine: Layout  # of what this rank comes to know
    mean: Bucket | None = None
    waits: int = 0
    sent: bool = False
    total: Tensor = field(default_factory=lambda: torch.zeros(()))  # of all numbers that this rank gave
    outcome: Outcome | None = None
    own: Bucket | None = None  # what this rank gave to the exchange, where that is kept

    @property
    def flats(self) -> list[Tensor]:
        """The buffer that is there, if any."""
        return [one.flat for one in (self.bucket or self.mean,) if one is not None]


@dataclass(slots=True)
class Timing:
    """Where the time of a step went, as far as the wire is concerned."""

    exposed_s: float = 0.0


class GradientReducer:
    """The gradients of one rank and their way to the mean of all.

    `params` are the trainable parameters by canonical name (tied ones once), `exchange` how their gradients meet: one
    for all, or one by parameter name. Their `.grad` become views of flat buckets, so a gradient is written once and
    sent from where it lies. Where the model is in stages they are those of this rank's. `counted_elsewhere` names the
    ones that another rank counts in the norm where all meet: of a stage that holds them too, of an island that owns the
    same of them. Each island that is apart counts its own.
    `meets`: the level at which the exchange must serve, where it is not `all`; each Window says at which level its
    gradients meet. Raises BadInput where an exchange cannot serve its buckets or this wire.

    `owned`: the part of a gradient whose mean this rank comes to know, where that is not all of it. `gives_back`: then
    the rest does not outlive the exchange, and a bucket is there from its first gradient on. No more of them are under
    way than the order of the messages asks for: backward waits. `keeps_sent`: a copy of what this rank gives to the
    exchange is kept, until the next step.
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
        self._rounds: dict[str, list[int]] = {}  # of every bucket's exchange, by the level at which gradients meet
        self._slot_of = {e.name: i for i, s in enumerate(self._slots) for e in s.layout.entries}

    def _slot(self, layout: Layout, exchange: Exchange) -> _BucketState:
        mine = Layout.of({e.name: self._owned(e.name, self._params[e.name]) for e in layout.entries})
        bucket = None if self._gives_back else layout.allocate()
        return _BucketState(layout, exchange, exchange.init(layout), bucket, replace(mine, dtype=layout.dtype))

    def adopt(self, exchanges: Mapping[str, Exchange], *, bucket_bytes: int) -> None:
        """Go on with other exchanges, between two steps. State of the same name and size is carried over, by parameter;
        what is still owed ("e") also where it stands deeper or less deep in the nesting; all else starts anew. Raises
        BadInput, changing nothing, where an exchange cannot serve, or has no place for what is owed.
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
        """The parameters."""
        return tuple(self._params)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(s.layout for s in self._slots)

    def gradients(self) -> dict[str, Tensor]:
        """By parameter name, in the order of the parameters: after `reduce` the mean over all ranks, of what this rank
        owns.
        """
        views = {name: view for s in self._slots for name, view in self._known(s)}
        return {name: views[name] for name in self._params}

    def _known(self, slot: _BucketState) -> Iterator[tuple[str, Tensor]]:
        if slot.bucket is not None:
            return ((name, self._owned(name, view)) for name, view in slot.bucket.slices())
        assert slot.mean is not None, "gradients that are given back are there after `reduce`"
        return slot.mean.slices()

    def sent_gradients(self) -> dict[str, Tensor]:
        """This rank's own of the step, by parameter name, as it gave them to the exchange; where they are kept."""
        return {name: view for s in self._slots if s.own is not None for name, view in s.own.slices()}

    @property
    def is_exact(self) -> bool:
        """Whether the mean that a rank gets is the weighted sum of what all gave, but for rounding."""
        return self._is_whole and all(slot.exchange.traits.lossless for slot in self._slots)

    def flats(self) -> list[Tensor]:
        """The flat buffers that hold them."""
        return [flat for s in self._slots for flat in s.flats]

    def begin(self, window: StepContext) -> None:
        """The first of a step: let every rank know the others' weights."""
        self._window, self._weights, self._watching = window, None, False
        self._sent_before, _ = self._pump.channel.meter.apart()
        self._weighing = self._pump.begin((1,))
        mine = torch.tensor((window.weight,), dtype=torch.float64)
        self._weighing.submit(0, self._gather(mine, self._who(window)))

    def open(self, window: StepContext) -> None:
        """Zero the gradients and declare the step's jobs. Begins the step where nobody has."""
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
        """What exchanges see of the levels where only the ranks of `level` are to meet."""
        return self.levels if level == "all" else self.levels.only(level)

    def _method(self, exchange: Exchange, level: str) -> Exchange:
        """The exchange where the ranks of `level` meet; one alone has nothing to compress."""
        if level == "all":
            return exchange
        return Dense() if len(self.levels.group(level, self.rank)) == 1 else exchange.for_island()

    def labels(self) -> float:
        """Valid labels of all ranks whose gradients meet, once the step has begun: waits for the last of them."""
        return float(self.weights()[list(self.levels.group(self._window.level, self.rank))].sum())

    def shares(self) -> Tensor:
        """(ranks,) float64: every rank's part of what those whose gradients meet have seen in this step, by valid
        labels; of other islands nothing is known.
        """
        weights, members = self.weights(), list(self.levels.group(self._window.level, self.rank))
        total = weights[members].sum()
        return weights / total if total > 0 else torch.full_like(weights, 1 / len(members))

    def watch(self) -> None:
        """The next backward is the step's last: from now on a full bucket goes out."""
        self._watching = True

    def reduce(self) -> None:
        """Send what has not gone out (unused parameters fill no bucket), wait for all means, and put them in place."""
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
        """Exchange votes, among those whose gradients meet."""
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
        """Parameters for which this rank had no gradient in the step, and for which nothing came that was owed."""
        none = frozenset(self._params) - self._touched
        for slot in self._slots if none else ():
            if any(True for _ in slot.state.flatten()):  # what it keeps from step to step it may give out now
                none -= {name for name, view in self._known(slot) if name in none and bool(view.any())}
        return none

    def _met(self) -> tuple[int, ...]:
        """The ranks whose gradients meet in the step, and that hold the same parameters."""
        return tuple(self.levels.group(self._window.level, self.rank))

    def _idle_everywhere(self, idle: frozenset[str], marks: Tensor) -> frozenset[str]:
        """Of all whose gradients meet; asked for by name only where their marks say that they differ."""
        if bool((marks == marks[0]).all()):
            return idle
        bits = torch.tensor([name in idle for name in self._params], dtype=torch.uint8)
        (rows,) = self._gathered([bits], self._window.level)  # (ranks, parameters)
        everywhere = rows.view(-1, len(bits)).all(0).tolist()
        return frozenset(name for name, alone in zip(self._params, everywhere, strict=True) if alone)

    def gather(self, row: tuple[float, ...], level: str = "") -> Tensor:
        """The `row` of every rank, or of those at `level`, (ranks, len(row)) float64. All of them must call it, and not
        between `open` and `reduce`.
        """
        return self._gathered([torch.tensor(row, dtype=torch.float64)], level or self.levels.whole)[0]

    def _gathered(self, mine: Sequence[Tensor], level: str) -> list[Tensor]:
        """Each of them stacked over the ranks at `level`; all are on their way at once."""
        step = self._pump.begin((1,) * len(mine))
        for job, tensor in enumerate(mine):
            step.submit(job, self._gather(tensor, level))
        return [step.result(job).mean for job in range(len(mine))]

    def _gather(self, mine: Tensor, level: str) -> Generator[Message, tuple[Tensor, ...], Outcome]:
        (rows,) = yield Message((mine,), Collective.GATHER, level)
        return Outcome(rows, None, ExchangeState())

    def _not_finite(self) -> tuple[bool, bool]:
        """Whether what this rank gave is not finite, and whether a lossy exchange might have hidden that."""
        bad = [slot for slot in self._slots if not math.isfinite(slot.total.item())]
        return bool(bad), not all(slot.exchange.traits.lossless for slot in bad)

    def _who(self, window: StepContext) -> str:
        """The level of those who vote in a step."""
        return self.levels.whole if window.level == "all" else window.level

    def _norm_squared(self) -> float:
        """Of this rank's gradients, each number counted once among those whose gradients meet."""
        counted: list[Tensor] = []
        elsewhere = self._counted_elsewhere if self._window.level == "all" else frozenset()
        for slot in self._slots:
            mine = [view for name, view in self._known(slot) if name not in elsewhere]
            counted += slot.flats if self._is_whole and len(mine) == len(slot.layout.entries) else mine
        return global_norm_squared(counted).item() if counted else 0.0

    def sent_bytes(self) -> dict[str, int]:
        """Payload bytes this rank has sent since the step was opened, by link; of what goes beside the steps, since it
        was asked before: it goes when it can.
        """
        now, beside = self._pump.channel.meter.apart()
        sent = {link: count - self._sent_before.get(link, 0) for link, count in now.items()}
        sent |= {link: sent[link] + count - self._beside_before.get(link, 0) for link, count in beside.items()}
        self._beside_before = beside
        return sent

    def commit(self) -> None:
        """The step took effect: the exchanges' new states are the states."""
        for slot in self._slots:
            if slot.outcome is not None:
                slot.state, slot.outcome = slot.outcome.state, None

    def reject(self) -> None:
        """The step did not take effect: the exchanges' states are as they were."""
        for slot in self._slots:
            slot.outcome = None

    def states(self) -> dict[str, Tensor]:
        """All exchange state, by "path@parameter"."""
        found: dict[str, Tensor] = {}
        for slot in self._slots:
            found.update(named(slot.layout, slot.state))
        return found

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Take back what `states` gave; buckets may be cut differently as long as all state is shaped by parameter."""
        for slot in self._slots:
            slot.state = refilled(slot.layout, slot.state, states)

    def close(self) -> None:
        """Let the parameters go: hooks off, gradients off."""
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
        """The bucket, from its first gradient on, or because it is to be sent."""
        slot = self._slots[index]
        if slot.bucket is None:
            self._make_room()
            slot.bucket = slot.layout.allocate()
            self._adopt(slot)
        return slot.bucket

    def _make_room(self) -> None:
        """Before one more bucket: wait for those whose exchange will come to its end without another one."""
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
        # The cheapest look at all numbers, for `agree`: from a mean that is not finite nobody sees whose they were.
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
        """`method`, which ends with the part of the mean that is this rank's alone."""
        outcome = yield from method
        mean = slot.mine.allocate()
        for (name, view), (_, own) in zip(Bucket(slot.layout, outcome.mean).slices(), mean.slices(), strict=True):
            own.copy_(self._owned(name, view))
        return replace(outcome, mean=mean.flat)

    def weights(self) -> Tensor:
        """(ranks,) float64: the valid labels of every rank that votes in the step, once it has begun; else 0."""
        if self._weights is None:
            began = time.perf_counter()
            told = self._weighing.result(0).mean.flatten()
            self._weights = torch.zeros(self.ranks, dtype=torch.float64)  # (ranks,)
            self._weights[list(self.levels.group(self._who(self._window), self.rank))] = told
            self.timing.exposed_s += time.perf_counter() - began
        return self._weights


def _mark(idle: frozenset[str]) -> float:
    """Below 1, and another one for every set of parameters; 0 for none of them."""
    if not idle:
        return 0.0
    said = hashlib.blake2b("\0".join(sorted(idle)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(said, "big") % (_MARKS - 1) + 1) / _MARKS


def _blamed(voters: Sequence[int], sick: Tensor, guilty: Tensor) -> tuple[int, ...]:
    """Where anything is not finite: the ranks it came from, or, if it came from none alone, those that have it."""
    if not bool(sick.any()):
        return ()
    return tuple(voters[i] for i in torch.nonzero(guilty if bool(guilty.any()) else sick).flatten().tolist())


def buckets_of(
    params: Mapping[str, Tensor], exchanges: Mapping[str, Exchange], *, bucket_bytes: int
) -> list[tuple[Layout, Exchange]]:
    """The buckets of all exchanges, in the order in which a backward pass fills them: one never mixes two exchanges."""
    groups: dict[Exchange, dict[str, Tensor]] = {}
    for name, param in params.items():
        groups.setdefault(exchanges[name], {})[name] = param
    found = [(layout, one) for one, held in groups.items() for layout in partition(held, bucket_bytes=bucket_bytes)]
    position = {name: i for i, name in enumerate(params)}
    return sorted(found, key=lambda item: -min(position[e.name] for e in item[0].entries))


def _keeping(state: ExchangeState, method: Rounds) -> Rounds:
    """A method without state, in place of one that has some."""
    out = yield from method
    return replace(out, state=state)


def _last(path: str) -> str:
    """ "e@name" of "0/1/e@name"."""
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
