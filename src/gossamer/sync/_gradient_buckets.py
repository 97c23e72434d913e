"""The gradient buckets of one rank: their buffers, the views of them that autograd writes, and their exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, divided_as, partition
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds
from gossamer.exchange import Exchange, compile_kernels, has_residual, is_residual
from gossamer.ops.norm import row_norms, squared_of
from gossamer.sharding import Holding, TieredStates
from gossamer.spec.errors import bad_input
from gossamer.spec.row_range import RowRange, whole_of
from gossamer.sync._marked_mean import marked
from gossamer.sync._state_by_name import refilled, state_by_name


@dataclass(slots=True)
class BucketState:
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
    is_kept: bool = False  # whether it stays after its mean is known, as gradients of other stages are added
    own: Bucket | None = None  # what this rank gave to the exchange, where that is kept
    clear: ExchangeState | None = None  # the last state in which nothing was left to pay
    norms: tuple[Tensor, Tensor] | None = None  # of the mean, where tiers have taken it (see ops.norm.row_norms)

    @property
    def flats(self) -> list[Tensor]:
        """Return the buffer that is allocated, if any."""
        return [one.flat for one in (self.bucket or self.mean,) if one is not None]

    def open(self) -> None:
        """Wait for all gradients of a new step."""
        self.waits, self.sent, self.outcome, self.mean = len(self.layout.entries), False, None, None
        self.norms = None

    def run(self, bucket: Bucket, method: Exchange, at: ExchangeContext, *, part: float = 1.0) -> Rounds:
        """Return the rounds of `method`: the bucket's exchange, or one without state that takes its place in a step.

        part: of all ranks, those that meet. What is owed is kept as a part of the mean of all ranks, and in a step of
        an island paid and owed as that of its own mean, which has so much weight among all. A method in its place pays
        all of it, as no later step of the island would.
        """
        if method is not self.exchange:
            return _keeping(self._paid(bucket, at, part), method.run(bucket, method.init(self.layout), at))
        if part == 1.0:
            return method.run(bucket, self.state, at)
        return _among_some(method.run(bucket, _owed_times(self.state, 1 / part), at), part)

    def _paid(self, bucket: Bucket, at: ExchangeContext, part: float) -> ExchangeState:
        """Add what this rank owes to its bucket; return the state after it."""
        if self.state is self.clear or not any(is_residual(path) for path, _ in self.state.flatten()):
            return self.state
        debt = torch.zeros_like(bucket.flat, dtype=torch.float32)
        after = _owed_times(self.exchange.settled(_owed_times(self.state, 1 / part), at, debt), part)
        bucket.flat.copy_(bucket.flat + debt)
        is_clear = not any(owed.any() for path, owed in after.flatten() if is_residual(path))
        self.clear = after if is_clear else None
        return after

    def receive(self, outcome: Outcome) -> None:
        """Write the mean to the gradients; the new state waits until the step takes effect."""
        self.outcome = outcome
        if self.bucket is None:
            self.mean = Bucket(self.mine, outcome.mean)
        elif outcome.mean.data_ptr() != self.bucket.flat.data_ptr():
            self.bucket.flat.copy_(outcome.mean)


class GradientBuckets:
    """The buckets that hold the gradients of one rank's parameters: each `.grad` is a view of one.

    `holdings`: what this rank holds, by parameter; of one without an entry all ranks hold all. `gives_back`: buckets
    are allocated while gradients are made and sent only. `replace_buckets` must be called first. The buckets of a
    divided parameter are row ranges of one buffer, so that autograd writes its gradient once.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        holdings: Mapping[str, Holding],
        gives_back: bool,
    ) -> None:
        self.params = dict(params)
        self.is_whole = not any(one.divided for one in holdings.values())  # this rank gets the mean of all rows
        self._elsewhere = frozenset(name for name, one in holdings.items() if not one.counts)
        self._holdings, self._gives_back = holdings, gives_back
        self.slots: list[BucketState] = []
        self.numbers_of: dict[str, tuple[int, ...]] = {}  # the numbers of the buckets that hold a parameter
        self._whole: dict[str, Bucket] = {}  # the buffers of divided parameters

    def replace_buckets(self, cut: list[tuple[Layout, Exchange]]) -> None:
        """Replace the buckets by those of `cut`, with the first state of their exchanges.

        Raises BadInput for a divided parameter whose rows ranks own, or whose bucket is given back.
        """
        parts = [part for layout, _ in cut if (part := _part(layout, self.params)) is not None]
        if parts and (self._gives_back or not self.is_whole):
            raise bad_input(
                wanted="whole parameters in the buckets, as their gradients are sharded or given back",
                got=parts[0].name,
                do="name the parameter, or leave plan.buckets out",
                key="plan.buckets",
            )
        self.slots.clear()  # the old buffers go before the new ones come
        self._whole.clear()
        self._whole |= {name: Layout.of({name: self.params[name]}).allocate() for name in {p.whole for p in parts}}
        self.slots.extend(self._slot(layout, one) for layout, one in cut)
        held = dict[str, tuple[int, ...]]()
        for index, slot in enumerate(self.slots):
            for name in self._names(slot):
                held[name] = (*held.get(name, ()), index)
        self.numbers_of = held

    def _slot(self, layout: Layout, exchange: Exchange) -> BucketState:
        compile_kernels(exchange, layout.device)
        part = _part(layout, self.params)
        if part is not None:
            rows = Bucket(layout, self._rows(self._whole[part.whole].flat, part))
            return BucketState(layout, exchange, exchange.init(layout), rows, layout)
        mine = Layout.of({e.name: self._owned(e.name, self.params[e.name]) for e in layout.entries})
        bucket = None if self._gives_back else layout.allocate()
        found = BucketState(layout, exchange, exchange.init(layout), bucket, replace(mine, dtype=layout.dtype))
        found.is_kept = any(e.name in self._holdings and self._holdings[e.name].added for e in layout.entries)
        return found

    def _rows(self, flat: Tensor, part: RowRange) -> Tensor:
        """Return the rows `part` of a divided parameter's flat buffer, flat."""
        each = flat.numel() // self.params[part.whole].shape[0]
        return flat[part.start * each : part.stop * each]

    def _names(self, slot: BucketState) -> tuple[str, ...]:
        """Return the parameters that a bucket holds, or of which it holds a part."""
        part = _part(slot.layout, self.params)
        return tuple(e.name for e in slot.layout.entries) if part is None else (part.whole,)

    def adopt_views(self) -> None:
        """Make each `.grad` a view of its bucket, or None where that is not allocated."""
        for slot in self.slots:
            self.adopt(slot)

    def adopt(self, slot: BucketState) -> None:
        """Make the `.grad` of one bucket's parameters views of it, or None where it is not allocated."""
        views = dict(slot.bucket.slices()) if slot.bucket is not None else {}
        for name in self._names(slot):
            self.params[name].grad = self._view(name) if name in self._whole else views.get(name)

    def _view(self, name: str) -> Tensor:
        """Return the gradient of a divided parameter."""
        return self._whole[name].flat.view(self.params[name].shape)

    def give_back(self, slot: BucketState, method: Rounds) -> Rounds:
        """Free a bucket that `method` sends; return the rounds, whose mean is the part that this rank owns."""
        method, slot.bucket = self._own_part(slot, method), None
        self.adopt(slot)
        return method

    def taken(self, slot: BucketState, method: Rounds, marks: Tensor, tiers: TieredStates) -> Rounds:
        """Let a bucket that `method` sends go; return the rounds, which give the mean to `tiers`.

        `marks` (parameters,) int32: 1 where this rank has a gradient. They go with the message: an update that is not
        to wait for the vote on the step must know whether any rank has one.
        """
        method, slot.bucket = self._taken(slot, slot.bucket, method, marks, tiers), None
        self.adopt(slot)
        return method

    def _taken(
        self, slot: BucketState, bucket: Bucket | None, method: Rounds, marks: Tensor, tiers: TieredStates
    ) -> Rounds:
        assert bucket is not None, "a bucket is allocated before it is sent"
        outcome, ranks = yield from marked(method, marks)
        if outcome.mean.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(outcome.mean)
        idle = [e.name for e, count in zip(slot.layout.entries, ranks.tolist(), strict=True) if not count]
        slot.norms = tiers.take(slot.layout, bucket.flat, frozenset(idle))
        return replace(outcome, mean=bucket.flat[:0].clone())  # the memory is no longer ours

    def _own_part(self, slot: BucketState, method: Rounds) -> Rounds:
        """Run `method` and return this rank's part of the mean only."""
        outcome = yield from method
        mean = slot.mine.allocate()
        for (name, view), (_, own) in zip(Bucket(slot.layout, outcome.mean).slices(), mean.slices(), strict=True):
            own.copy_(self._owned(name, view))
        return replace(outcome, mean=mean.flat)

    def _owned(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a gradient whose mean this rank receives."""
        return tensor if self.is_whole else self._holdings[name].own(tensor)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter name, in the order of the parameters.

        They are this rank's own until the exchange of their bucket has ended, then the mean; with sharding, only the
        part that this rank owns. Those that tiers have taken over are left out.
        """
        views = {name: view for s in self.slots for name, view in self._known(s)}
        views |= {name: self._view(name) for name in self._whole}
        return {name: views[name] for name in self.params if name in views}

    def _known(self, slot: BucketState) -> Iterator[tuple[str, Tensor]]:
        if slot.norms is not None:
            return iter(())
        if slot.bucket is not None:
            return ((name, self._owned(name, view)) for name, view in slot.bucket.slices())
        assert slot.mean is not None, "gradients that are given back are there after `reduce`"
        return slot.mean.slices()

    def sent(self) -> dict[str, Tensor]:
        """Return this rank's own gradients as it gave them to the exchange, where they are kept."""
        views = {name: view for s in self.slots if s.own is not None for name, view in s.own.slices()}
        for name in self._whole:
            parts = sorted((part, one) for one in views if (part := RowRange.read(one)) and part.whole == name)
            if parts:
                views[name] = torch.cat([views.pop(one) for _, one in parts])
        return views

    def flats(self) -> list[Tensor]:
        """Return the buffers that are allocated now."""
        return [flat for s in self.slots for flat in s.flats]

    @property
    def is_exact(self) -> bool:
        """Return whether the mean on this rank is the weighted sum of all ranks' gradients, up to rounding."""
        return self.is_whole and all(slot.exchange.traits.lossless for slot in self.slots)

    def norm_squared(self, level: str) -> float:
        """Return the squared norm of the gradients that this rank counts where the ranks of `level` average them.

        In a local step each island counts its own.
        """
        counted = [self._counted(slot, level) for slot in self.slots]
        taken = [slot.norms for slot in self.slots if slot.norms is not None]
        kinds = [one.dtype for part in counted for one in part] + [short.dtype for _, short in taken]
        dtype = torch.float64 if torch.float64 in kinds else torch.float32
        norms = [
            one
            for slot, part in zip(self.slots, counted, strict=True)
            for one in ([slot.norms] if slot.norms is not None else [row_norms(flat, dtype) for flat in part])
        ]
        return squared_of(norms).item() if norms else 0.0

    def _counted(self, slot: BucketState, level: str) -> list[Tensor]:
        """Return the tensors of a bucket whose norm this rank counts; none where tiers have taken it."""
        elsewhere = self._elsewhere if level == "all" else frozenset()
        mine = [view for name, view in self._known(slot) if self._param(name) not in elsewhere]
        return slot.flats if self.is_whole and len(mine) == len(slot.layout.entries) else mine

    def not_finite(self) -> tuple[bool, bool]:
        """Return whether this rank's input was non-finite, and whether a lossy exchange might have hidden that."""
        bad = [slot for slot in self.slots if not math.isfinite(slot.total.item())]
        return bool(bad), not all(slot.exchange.traits.lossless for slot in bad)

    def idle(self, touched: set[str]) -> frozenset[str]:
        """Return the parameters that are not `touched` on this rank, and without a residual in the mean."""
        none = frozenset(self.params) - touched
        for slot in self.slots if none else ():
            if any(True for _ in slot.state.flatten()):  # what it keeps from step to step it may give out now
                none -= {self._param(one) for one, view in self._known(slot) if self._param(one) in none and view.any()}
        return none

    def _param(self, name: str) -> str:
        """Return the parameter of which `name` is the name, or that of a part."""
        return name if name in self.params else whole_of(name)

    def commit(self) -> None:
        """Make the exchanges' new states current."""
        for slot in self.slots:
            if slot.outcome is not None:
                slot.state, slot.outcome = slot.outcome.state, None

    def reject(self) -> None:
        """Drop the exchanges' new states."""
        for slot in self.slots:
            slot.outcome = None

    def states(self) -> dict[str, Tensor]:
        """Return the state of all exchanges, by "path@parameter".

        What the parts of a parameter keep of every row is one tensor of the parameter's shape, whatever the parts: it
        is 0 in the rows of which nothing is kept.
        """
        found: dict[str, Tensor] = {}
        for slot in self.slots:
            states, part = state_by_name(slot.layout, slot.state), _part(slot.layout, self.params)
            for path in () if part is None else _by_row(slot):
                assert part is not None
                rows, shape = states.pop(f"{path}@{part.name}"), self.params[part.whole].shape
                whole = found.setdefault(f"{path}@{part.whole}", torch.zeros(shape, dtype=rows.dtype).to(rows.device))
                whole[part.start : part.stop] = rows
            found.update(states)
        return found

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Load the tensors of `states` as `carry_over` does; what is not among them starts anew."""
        for slot in self.slots:
            slot.state = slot.exchange.init(slot.layout)
        self.carry_over(states)

    def _of(self, slot: BucketState, states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return `states`, and of what is kept of each row the rows of which the bucket is a part, by its name."""
        part = _part(slot.layout, self.params)
        if part is None:
            return states
        shape, by_row, rows = self.params[part.whole].shape, _by_row(slot), dict[str, Tensor]()
        for name, tensor in states.items():
            path, _, whole = name.partition("@")
            if whole == part.whole and tensor.shape == shape and (path in by_row or is_residual(path)):
                rows[f"{path}@{part.name}"] = tensor[part.start : part.stop]
        return {**states, **rows}

    def carry_over(self, held: Mapping[str, Tensor]) -> None:
        """Load those of the states `held` by the buckets before that have the same name and size, and residuals.

        Residuals that no exchange keeps at their depth any more are added to one that it does keep.
        """
        for slot in self.slots:
            before, now = self._of(slot, held), state_by_name(slot.layout, slot.state)
            there = {n: before[n] if n in before and before[n].shape == t.shape else t for n, t in now.items()}
            for name, tensor in before.items():
                heirs = [] if name in now or not is_residual(name) else [n for n in now if _last(n) == _last(name)]
                if heirs and tensor.shape == there[heirs[0]].shape:
                    there[heirs[0]] = there[heirs[0]] + tensor.to(there[heirs[0]])
            slot.state = refilled(slot.layout, slot.state, there)

    def kept_by_owners(self, levels: ProcessGroups, rank: int, *, but: Collection[tuple[str, ...]] = ()) -> list[str]:
        """Return the names of states that one rank of an island keeps for all of it, residuals left out.

        `but`: names of the tensors of buckets to leave out.
        """
        return [
            name
            for slot in self.slots
            if tuple(entry.name for entry in slot.layout.entries) not in but
            for path in slot.exchange.owned(slot.layout, levels, rank)
            for name in state_by_name(slot.layout, slot.state)
            if name.startswith(f"{path}/") and not is_residual(name)
        ]

    def to_owners(self, levels: ProcessGroups, rank: int, total: Callable[[Tensor], Tensor]) -> None:
        """Give the residuals of an island to those of its ranks that send them; the others would keep them for ever.

        `total`: returns the sum over the island of a tensor of every rank. All ranks must call it.
        """
        for slot in self.slots:
            tensors = dict(slot.state.flatten())
            owed = {
                name: torch.where(mine.to(tensor.device), total(tensor.clone()), 0.0)
                for path, mine in slot.exchange.owned(slot.layout, levels, rank).items()
                for name, tensor in tensors.items()
                if name.startswith(f"{path}/") and is_residual(name) and tensor.shape == mine.shape
            }
            slot.state = slot.state.replace(tensors | owed)

    def check_owed(self, exchanges: Mapping[str, Exchange]) -> None:
        """Raise BadInput where one of `exchanges`, by parameter name, keeps no residual and there is one now."""
        parts: dict[str, list[Exchange]] = {}  # of a parameter whose parts have any of their own
        for part, one in exchanges.items():
            if (whole := whole_of(part)) != part:
                parts.setdefault(whole, []).append(one)
        for slot in self.slots:
            if not has_residual(slot.exchange):
                continue
            for name in self._names(slot):
                serving = parts.get(name) or [exchanges[name]]
                without = next((one for one in serving if not has_residual(one)), None)
                if without is not None:
                    raise bad_input(
                        wanted=f"an exchange with error feedback for {name}, which has a residual to send",
                        got=repr(without),
                        do="wrap that exchange in error_feedback ({error_feedback: dense} sends the residual at once)",
                    )


def buckets_of(
    params: Mapping[str, Tensor],
    exchanges: Mapping[str, Exchange],
    *,
    bucket_bytes: int,
    named: Sequence[Sequence[str]] = (),
) -> list[tuple[Layout, Exchange]]:
    """Return the buckets in the order of sending, each with its exchange; none mixes two exchanges, types or devices.

    `named`: the parameters of each bucket of a plan, in the order of sending, or one row range of a parameter. Those
    that are in none follow, in the order backward fills them, in buckets of at most `bucket_bytes`. A part of which
    `exchanges` says nothing has that of its parameter. Raises BadInput where parts are not all of a parameter's rows.
    """
    params = divided_as(params, named)
    exchanges = {name: exchanges.get(name) or exchanges[whole_of(name)] for name in params}
    planned = _planned(params, exchanges, named)
    there = {entry.name for layout, _ in planned for entry in layout.entries}
    return planned + _filled({n: p for n, p in params.items() if n not in there}, exchanges, bucket_bytes=bucket_bytes)


def _planned(
    params: Mapping[str, Tensor], exchanges: Mapping[str, Exchange], named: Sequence[Sequence[str]]
) -> list[tuple[Layout, Exchange]]:
    """Return the buckets of a plan, as far as there are parameters for them."""
    groups: dict[tuple[int, Exchange, torch.dtype, torch.device], dict[str, Tensor]] = {}
    for number, names in enumerate(named):
        for name in names:
            if (p := params.get(name)) is not None:
                groups.setdefault((number, exchanges[name], p.dtype, p.device), {})[name] = p
    return [(Layout.of(held), key[1]) for key, held in groups.items()]


def _filled(
    params: Mapping[str, Tensor], exchanges: Mapping[str, Exchange], *, bucket_bytes: int
) -> list[tuple[Layout, Exchange]]:
    groups: dict[Exchange, dict[str, Tensor]] = {}
    for name, param in params.items():
        groups.setdefault(exchanges[name], {})[name] = param
    found = [(layout, one) for one, held in groups.items() for layout in partition(held, bucket_bytes=bucket_bytes)]
    position = {name: i for i, name in enumerate(params)}
    return sorted(found, key=lambda item: -min(position[e.name] for e in item[0].entries))


def _part(layout: Layout, params: Mapping[str, Tensor]) -> RowRange | None:
    """Return the row range that a bucket holds; None for one of whole parameters."""
    name = layout.entries[0].name
    return None if name in params else RowRange.read(name)


def _by_row(slot: BucketState) -> list[str]:
    """Return the paths of what the exchange of a bucket keeps for each of its numbers."""
    numel = slot.layout.numel
    return [path for path, tensor in slot.state.flatten() if "@" not in path and tensor.shape == (numel,)]


def _among_some(method: Rounds, part: float) -> Rounds:
    """Run a method among a part of all ranks, and return what it owes as a part of the mean of all."""
    out = yield from method
    return replace(out, state=_owed_times(out.state, part))


def _owed_times(state: ExchangeState, factor: float) -> ExchangeState:
    tensors = dict(state.flatten())
    owed = {path: tensor * factor for path, tensor in tensors.items() if is_residual(path)}
    return state.replace(tensors | owed) if owed else state


def _keeping(state: ExchangeState, method: Rounds) -> Rounds:
    """Run a method without state in place of one that has `state`, which is kept."""
    out = yield from method
    return replace(out, state=state)


def _last(path: str) -> str:
    """Return "e@name" of "0/1/e@name"."""
    state, at, name = path.partition("@")
    return f"{state.rpartition('/')[2]}{at}{name}"
