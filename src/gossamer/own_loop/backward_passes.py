"""Backward passes of somebody's own loop: what a pass adds to `.grad` is the mean of all ranks before it returns.

    pass     the first gradient opens it: a row of every rank is gathered (which pass it is, what its loss counts, which
             batch), buckets fill as gradients arrive and go out when they are full
    end      a callback that the autograd engine runs when the pass is over: what is not full follows in the declared
             order, one message says which parameters had a gradient anywhere, means are waited for and put in place

What lay in `.grad` before is set aside and added after, so k passes before a step cost k exchanges and are the sum of
k means, as in one process. Where passes are grouped (`accumulate`, `no_sync`) gradients are weighed as they arrive,
and the last of the group sends their sum. Nothing outlives a step before `commit`: exchange states are pending until
then, and a step that never came (a GradScaler that skipped it, gradients that were zeroed) leaves them as they were.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel import Channel, Pending
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import Collective, ExchangeContext, ExchangeState, Message, Outcome, Rounds
from gossamer.exchange import Exchange, has_residual
from gossamer.exchange.dense import Dense
from gossamer.loss_reader.count import Kind, LossCount
from gossamer.ops.fingerprint import digest
from gossamer.own_loop.blocking_exchange import BlockingExchange
from gossamer.own_loop.exchange_choice import WATCHED, PassWatch
from gossamer.own_loop.losses import BackwardCall, watched
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.process_group import LoopGroup
from gossamer.own_loop.status_rows import BACKWARD, LOSS, TAKEN, TOLD, Deferred, StatusRow, StatusRows
from gossamer.own_loop.trained_parameters import TrainedParameters
from gossamer.spec.errors import BadInput, PeerLost
from gossamer.spec.method_config import Exchanges
from gossamer.sync import buckets_of

AUTO = "auto"
_SMALL_BYTES = 256 << 10  # a bucket that costs a message more than its bytes
_SKIPPED = 40  # steps in a row: more than a GradScaler skips until it has found its scale


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How a loop's gradients meet. `loss`: read from its graph, a mean over what the weight counts, or a sum."""

    accumulate: int = 1
    loss: str = "read"
    seed: int = 0
    lossy: bool = False  # whether an exchange that is chosen may lose something
    scale: Callable[[], float] | None = None  # what losses are multiplied with, of a GradScaler
    bucket_bytes: int = 25 << 20


@dataclass(slots=True)
class _GradientBucket:
    """One bucket. `pending`: the exchange's state after the passes since the last step, if there were any.

    `tail`: of a bucket that is only summed, some numbers behind its gradients: what this rank's count, and for every
    parameter whether it had one. So a sum of gradients times counts brings along what it is divided by, and nothing
    need be known before it goes out. None where an exchange has more to do.
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


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What lay in `.grad` before a pass: a copy, where that was the bucket's own view."""

    gradient: Tensor
    was_view: bool


@dataclass(slots=True)
class _Pass:
    """A backward pass under way. `ending` lives as long as the engine means to call it."""

    row: StatusRow
    weighing: Pending
    exchanging: CommStep | BlockingExchange | None  # None: of a group, and not its last
    is_grouped: bool
    endings: dict[int, weakref.ref[_Ending]]
    deferred: Deferred | None = None  # of the step before
    touched: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    rows: StatusRows | None = None


class BackwardPasses:
    """All backward passes over the trained parameters of one model, on one rank of several.

    `trained` says which, by name, in the order in which a forward pass uses them. Raises BadInput where a pass cannot
    be exact, WireMismatch where ranks are at different places of their loops, PeerLost where one does not come.
    """

    def __init__(
        self, trained: TrainedParameters, exchanges: Exchanges, party: LoopGroup, pump: CommThread, words: Channel,
        hand: PassInputs, manner: PassSettings,
    ) -> None:  # fmt: skip
        """`words`: a channel beside that of the pump, for rows and marks, which the calling thread sends itself."""
        self.trained, self.party, self.pump, self.hand, self.manner = trained, party, pump, hand, manner
        self._words = words
        self._watch = PassWatch(lossy=manner.lossy) if exchanges == AUTO else None
        self._rules = exchange_methods.rules("dense" if exchanges == AUTO else exchanges, key="exchange")
        self._bucket_bytes = manner.bucket_bytes
        self.is_closed = False
        self.serial = 0  # of the last pass
        self.rate: Callable[[], float] = lambda: 1.0  # of the optimizer, which feedback follows
        self.skipped = 0  # steps in a row that never came
        self.last: StatusRows | None = None  # of the last pass
        self._deferred: Deferred | None = None
        self._counted: LossCount | None = None
        self._roots: tuple[Tensor, ...] = ()
        self._sums: list[Tensor] = []
        self._pass: _Pass | None = None
        self._held: set[str] = set()  # of a group that is not sent yet
        self._grouped = 0  # passes of it
        self._quiet = 0  # depth of no_sync
        self._earlier: dict[str, _Earlier] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._nodes: list[torch.autograd.graph.Node] = []
        self._slots: list[_GradientBucket] = []
        self._params: dict[str, nn.Parameter] = {}
        first = trained.new({})
        self._rules.by_name(first)  # a line that serves no parameter is told
        self.take_in(first)
        weakref.finalize(self, watched().look(_Looker(weakref.ref(self))))

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        return self._params

    @property
    def is_held(self) -> bool:
        """Whether gradients of a group wait for its last pass."""
        return bool(self._held)

    @property
    def is_finite(self) -> bool:
        """Whether this rank's own losses and gradients were, of the passes since the last step."""
        return all(bool(torch.isfinite(one)) for one in (*self._roots, *self._sums))

    def _take_in_later(self, params: Mapping[str, nn.Parameter]) -> None:
        """Parameters that were unfrozen, or given to an optimizer, since the last pass: alike on all ranks?"""
        found = float(digest(list(params.values()), len(params)) % 2**52)
        beside = (found, float(len(params)))
        rows = self.gathered(
            StatusRow(TAKEN, self.serial, beside=beside), "taking in parameters that were unfrozen or added"
        )
        if len({tuple(row) for row in rows.beside.tolist()}) > 1:
            raise BadInput(
                f"{', '.join(params)}: unfrozen or added after gossamer.wrap, with other values on other ranks: make "
                "them from the same seed on all ranks"
            )
        self.take_in(params)

    def take_in(self, params: Mapping[str, nn.Parameter]) -> None:
        """Parameters that are trained from now on. All ranks take in the same, in the same order."""
        self._lay_out(params)
        for name, param in params.items():
            _let_go(param)
            _refuse_after_hooks(name, param, 0)
            self._hook(name, param)

    def _lay_out(self, params: Mapping[str, nn.Parameter]) -> None:
        """Buckets for them, behind those that there are."""
        exchanges = {name: self._rules.of(name) for name in params}
        for layout, exchange in _without_small(buckets_of(params, exchanges, bucket_bytes=self._bucket_bytes), params):
            exchange.check(layout, self.pump.channel.levels)
            self._slots.append(_slot(layout, exchange))
        self._params |= params
        self._slot_of = {e.name: i for i, slot in enumerate(self._slots) for e in slot.layout.entries}
        self._place = {name: index for index, name in enumerate(self._params)}
        self.remembers = any(True for slot in self._slots for _ in slot.state.flatten())  # from step to step
        levels, rank = self.pump.channel.levels, self.party.rank
        self._rounds = [len(s.exchange.traffic(s.layout, levels, rank)) for s in self._slots]

    def _hook(self, name: str, param: nn.Parameter) -> None:
        with torch.enable_grad():
            node = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert node is not None
        self._nodes.append(node)  # a parameter holds its own only weakly, and hooks go with it
        me = weakref.ref(self)
        self._handles.append(node.register_prehook(_Before(me, name)))
        self._handles.append(param.register_post_accumulate_grad_hook(_After(me, name)))  # type: ignore[no-untyped-call]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Passes inside are of one group with the next that follows."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @contextmanager
    def answered(self, doing: str = "") -> Iterator[None]:
        """Around what waits for other ranks: raises PeerLost with those that did not come."""
        try:
            yield
        except PeerLost as error:
            raise self.party.lost(error, doing or f"backward pass {self.serial}") from None

    # What the engine calls.

    def asked(self, asked: BackwardCall) -> None:
        """A backward pass is about to run: what do its losses count?"""
        if new := self.trained.new(self._params):
            self._take_in_later(new)
        for param in self._params.values():
            _defer_hooks(param)
        if self._watch is not None:
            self._watch.turn()
        self._counted = None
        if self.manner.loss == "read" and self.hand.weigh is None:
            self._counted = asked.counted(self.hand)
        self._roots = tuple(root.detach().sum() for root in asked.roots)

    def before(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """A gradient of `name` is about to be added."""
        one = self._opened(name)
        param = self._params[name]
        if name not in self._held or not self._is_view(name, param.grad):
            self._set_aside(name)
        one.touched.add(name)
        param.grad = None  # what arrives is this pass's alone
        if one.is_grouped and gradient is not None and (weight := self._weight(one)) != 1.0:
            return gradient * weight
        return None

    def after(self, name: str, param: Tensor) -> None:
        """A gradient of `name` has arrived."""
        one, new = self._pass, param.grad
        if one is None or name not in one.touched or new is None:
            raise BadInput(
                f"{name} was made anew after gossamer.wrap (its type or device changed: {param.dtype}, {param.device}"
                "): move and convert the model before it is wrapped"
            )
        if new.requires_grad:
            raise BadInput(
                f"backward(create_graph=True) gives {name} a gradient to differentiate again, and the mean of all "
                "ranks has no graph: use torch.autograd.grad(loss, ..., create_graph=True), then backward"
            )
        _refuse_after_hooks(name, param, 1)
        slot = self._slots[self._slot_of[name]]
        view = slot.views[name]
        with torch.no_grad():
            if one.is_grouped and self._weight(one) == 0.0:
                new = None  # a rank without anything that counts may have nan there
            if name in self._held:
                view.add_(new) if new is not None else None
            elif new is None:
                view.zero_()
            elif new.layout != torch.strided:
                view.zero_().add_(new)
            else:
                view.copy_(new)
        if self._watch is not None and self.serial == WATCHED and new is not None and new.layout == torch.strided:
            self._watch.see(name, new)
        param.grad = view
        one.arrived.add(name)
        slot.waits -= 1
        if slot.waits == 0 and one.exchanging is not None:
            self._send(one, self._slot_of[name])

    def end(self) -> None:
        """The engine has done all of a graph's work: finish the pass, if there is one."""
        one, self._pass = self._pass, None
        if one is None:
            return
        try:
            if one.exchanging is None:
                self._hold(one)
            else:
                self._exchange(one, one.exchanging)
        except BaseException:
            self._drop(one)
            raise

    # One pass.

    def share(self) -> float:
        """What this rank's gradient counts in the mean, of the pass that runs. Begins it where nothing has."""
        return self._rows(self._opened("")).share

    def _opened(self, name: str) -> _Pass:
        """The pass that a gradient of `name` belongs to; "": of none yet."""
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        one = self._pass
        if one is not None and all(ending() is None for ending in one.endings.values()):
            self._drop(one)
            raise BadInput(
                f"backward pass {one.row.serial} ended with an exception on this rank, and the others wait for its "
                "gradients: end the script, or catch what is wrong before backward is called"
            )
        if one is not None and name in one.touched:  # a checkpoint's own pass comes to it a second time
            self.end()
            one = None
        if one is None:
            one = self._pass = self._open()
        if task not in one.endings:
            ending = _Ending(weakref.ref(self))
            torch.autograd.Variable._execution_engine.queue_callback(ending)  # type: ignore[attr-defined]
            one.endings[task] = weakref.ref(ending)
        return one

    def _open(self) -> _Pass:
        self._give_up_if_dropped()
        self.serial += 1
        self._grouped += 1
        is_held = bool(self._quiet) or (self._grouped < self.manner.accumulate and not self.hand.is_last)
        counted = self.hand.counted(self._counted, self.manner.loss)
        deferred, self._deferred = self._deferred, None
        beside = (float(len(self._params)), *(deferred.told if deferred is not None else ()))
        row = StatusRow.of(BACKWARD, self.serial, counted, self.hand.mark, beside=beside)
        weighing = self._words.start(Message((row.tensor(),), Collective.GATHER))
        exchanging = None if is_held else self._exchanges()
        for slot in self._slots:
            slot.waits, slot.sent = len(slot.layout.entries), False
        return _Pass(row, weighing, exchanging, is_held or self._grouped > 1, {}, deferred)

    def _exchanges(self) -> CommStep | BlockingExchange:
        """What sends the buckets of a pass, in an order that is the same on all ranks."""
        if all(rounds == 1 for rounds in self._rounds):
            return BlockingExchange(self.pump.channel)
        return self.pump.begin(self._rounds)

    def _rows(self, one: _Pass) -> StatusRows:
        """What all ranks said of this pass. Waits for the last of them; raises where they do not go together."""
        if one.rows is None:
            (told,) = one.weighing.wait()
            one.rows = StatusRows.of(told, self.party.rank, one.row)
            one.rows.check()
            if one.deferred is not None:
                one.deferred.judge(one.rows.beside[:, 1 : 1 + TOLD])
            self.hand.learn(one.row.counted, one.rows.kind)
            self.last = one.rows
        return one.rows

    def _weight(self, one: _Pass) -> float:
        """What a grouped gradient counts, of ranks that are summed as equals."""
        rows = self._rows(one)
        return rows.share * self.party.ranks * rows.factor

    def _send(self, one: _Pass, index: int) -> None:
        slot = self._slots[index]
        assert one.exchanging is not None
        slot.sent = True
        flat = slot.bucket.flat
        if slot.tail is not None:
            self._sums.append(flat.sum())
            self._count_in(one, slot, slot.tail)
            one.exchanging.submit(index, _summed(slot))
            return
        rows = self._rows(one)
        if one.is_grouped:
            weights = torch.full((self.party.ranks,), 1 / self.party.ranks, dtype=torch.float64)
        else:
            weights = rows.shares
            if rows.share == 0.0:
                flat.zero_()  # a rank without anything that counts may have nan there
        self._sums.append(flat.sum())
        if (scale := self._scale(slot)) != 1.0:
            flat.mul_(1.0 / scale)
        key, levels = (self.manner.seed, self.serial), self.pump.channel.levels
        at = ExchangeContext(self.party.rank, levels, weights, key, self.rate(), accounts=False)
        state = slot.state if slot.pending is None else slot.pending
        one.exchanging.submit(index, slot.exchange.run(slot.bucket, state, at))

    def _count_in(self, one: _Pass, slot: _GradientBucket, tail: Tensor) -> None:
        """The bucket's gradients times what they count, and behind them what that is."""
        counted = one.row.counted
        count = 1.0 if one.is_grouped or not counted.counts else max(0.0, counted.counts[0])
        if count == 0.0:
            slot.bucket.flat.zero_()  # a rank without anything that counts may have nan there
        elif count != 1.0:
            slot.bucket.flat.mul_(count)
        had = [float(entry.name in one.arrived or entry.name in self._held) for entry in slot.layout.entries]
        tail.copy_(torch.tensor([count, *had], dtype=tail.dtype))

    def _scale(self, slot: _GradientBucket) -> float:
        """What gradients are divided by, so that what is kept for later is of no scale."""
        keeps = self.manner.scale is not None and any(True for _ in slot.state.flatten())
        return self.manner.scale() if keeps and self.manner.scale is not None else 1.0

    def _hold(self, one: _Pass) -> None:
        """The end of a pass whose gradients wait for others of its group."""
        self._rows(one)
        self._held |= one.arrived

    def _exchange(self, one: _Pass, exchanging: CommStep | BlockingExchange) -> None:
        """The end of a pass that meets."""
        if self._watch is not None and self.serial == WATCHED:
            self._watch.end()
        rows = self._rows(one)
        mine = one.arrived | {name for name in self._held if self._is_view(name, self._params[name].grad)}
        for name in self._params:
            if name not in one.touched and name not in mine:
                self._set_aside(name)
                self._slots[self._slot_of[name]].views[name].zero_()
        for index, slot in enumerate(self._slots):
            if not slot.sent:
                self._send(one, index)
        is_marked = any(slot.tail is None for slot in self._slots)
        marking = self._words.start(Message((self._marks(mine),), Collective.MAX)) if is_marked else None
        anywhere: dict[str, bool] = {}
        for index, slot in enumerate(self._slots):
            outcome = exchanging.result(index)
            if slot.tail is not None:
                total, *had = slot.tail.tolist()
                anywhere |= {e.name: one > 0 for e, one in zip(slot.layout.entries, had, strict=True)}
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
            anywhere = {name: bool(one) for name, one in zip(self._params, marked.tolist(), strict=True)}
        with torch.no_grad():
            for name in self._params:
                self._put(name, had=anywhere[name])
        self._held, self._grouped = set(), 0

    def _divide(self, one: _Pass, slot: _GradientBucket, total: float, rows: StatusRows) -> None:
        """A bucket's sum of gradients times counts becomes the gradient of the whole batch."""
        if one.is_grouped:
            slot.bucket.flat.mul_(1 / self.party.ranks)
        elif rows.kind is not Kind.SUM and total not in (0.0, 1.0):
            slot.bucket.flat.div_(total)

    def _marks(self, names: set[str]) -> Tensor:
        marks = torch.zeros(len(self._params), dtype=torch.uint8)
        for name in names:
            marks[self._place[name]] = 1
        return marks

    def _put(self, name: str, *, had: bool) -> None:
        """The mean of one parameter, and what lay there before."""
        param, slot = self._params[name], self._slots[self._slot_of[name]]
        view, earlier = slot.views[name], self._earlier.pop(name, None)
        if not had and not (has_residual(slot.exchange) and bool(view.any())):
            if earlier is None:
                param.grad = None
            else:
                param.grad = view.copy_(earlier.gradient) if earlier.was_view else earlier.gradient
            return
        for hook in list((param._backward_hooks or {}).values()):
            changed = hook.on_mean(view) if isinstance(hook, _Deferred) else None
            if changed is not None:
                view.copy_(changed)
        if earlier is None:
            param.grad = view
        elif earlier.was_view:
            param.grad = view.add_(earlier.gradient)
        else:
            param.grad = earlier.gradient.add_(view)  # somebody's own tensor stays what `.grad` is

    def _set_aside(self, name: str) -> None:
        """Keep what lies in `.grad`, where the bucket is to be written."""
        grad = self._params[name].grad
        if grad is None:
            self._earlier.pop(name, None)
            self._held.discard(name)  # somebody dropped what the group had so far
        elif not self._is_view(name, grad):
            self._earlier[name] = _Earlier(grad, was_view=False)
            self._held.discard(name)
        elif name not in self._held:
            self._earlier[name] = _Earlier(grad.detach().clone(), was_view=True)

    def _is_view(self, name: str, grad: Tensor | None) -> bool:
        return grad is not None and grad.data_ptr() == self._slots[self._slot_of[name]].views[name].data_ptr()

    def _drop(self, one: _Pass) -> None:
        """Give a pass up: nothing of it has moved."""
        self._pass = None
        if one.exchanging is not None:
            one.exchanging.drop()

    # The step.

    def commit(self) -> None:
        """The step took effect: what the exchanges carry is theirs."""
        for slot in self._slots:
            slot.state, slot.pending = (slot.state if slot.pending is None else slot.pending), None
        self.skipped = 0
        self._sums = []
        self._choose()

    def _choose(self) -> None:
        """After a step: settle on an exchange, once a pass has been watched; and look at when the next step begins."""
        if self._watch is None:
            return
        if self.serial < WATCHED:
            self._watch.began_s = time.perf_counter()
            return
        chosen = self._watch.choose(self._params, self.pump, self.manner.bucket_bytes)
        self._watch = None
        self._rules, self._bucket_bytes = exchange_methods.rules(chosen.exchange, key="exchange"), chosen.bucket_bytes
        self._slots = []  # what lies in `.grad` is its own from now on
        self._lay_out(self._params)

    def reject(self) -> None:
        """The step did not take effect: exchanges go on from where they were."""
        for slot in self._slots:
            slot.pending = None
        self._sums = []

    def _give_up_if_dropped(self) -> None:
        """Passes whose gradients somebody has dropped or zeroed were for no step."""
        if self._held or not any(slot.pending is not None for slot in self._slots):
            return
        if self.remembers and any(p.grad is not None and bool(p.grad.any()) for p in self._params.values()):
            return
        if not self.remembers and any(p.grad is not None for p in self._params.values()):
            return
        self.reject()
        self.skipped += 1
        if self.remembers and self.skipped > _SKIPPED:
            raise BadInput(
                f"{self.skipped} backward passes without a step of the optimizer that was wrapped: what the exchange "
                "keeps back would never be sent. Step it, or use an exchange that keeps nothing"
            )

    def defer(self, deferred: Deferred) -> bool:
        """Let the next pass tell it; whether there is room."""
        is_free = self._deferred is None
        self._deferred = deferred if is_free else self._deferred
        return is_free

    def gathered(self, row: StatusRow, doing: str) -> StatusRows:
        """The same row of every rank, beside the passes. Raises as a pass does."""
        with self.answered(doing):
            (told,) = self._words.start(Message((row.tensor(),), Collective.GATHER)).wait()
        rows = StatusRows.of(told, self.party.rank, row)
        rows.check()
        return rows

    def whole(self, loss: Tensor | float) -> Tensor | float:
        """The loss of the whole batch, from the ranks' own of the last pass. All ranks call it."""
        mine = float(loss)
        rows = self.gathered(StatusRow(LOSS, self.serial, beside=(mine,)), "a closure of optimizer.step()")
        shares, factor = (self.last.shares, self.last.factor) if self.last is not None else (rows.shares, 1.0)
        values = torch.where(shares > 0, rows.beside[:, 0], 0.0)
        value = float((values * shares).sum()) * factor
        return torch.full_like(loss.detach(), value) if isinstance(loss, Tensor) else value

    def close(self) -> None:
        """Let the parameters go: another wrap has them."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes, self.is_closed = [], [], True


def _without_small(
    buckets: Sequence[tuple[Layout, Exchange]], params: Mapping[str, Tensor]
) -> Iterator[tuple[Layout, Exchange]]:
    """The same, but none that is too small for a message of its own and is full right before another one."""
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


def _slot(layout: Layout, exchange: Exchange) -> _GradientBucket:
    """A bucket of zeros, with a tail where its exchange is nothing but a sum."""
    is_sum = isinstance(exchange, Dense) and layout.dtype in (torch.float32, torch.float64)
    tail = 1 + len(layout.entries) if is_sum else 0
    flat = torch.zeros(layout.numel + tail, dtype=layout.dtype, device=layout.device)
    bucket = Bucket(layout, flat[: layout.numel])
    views, behind = dict(bucket.slices()), flat[layout.numel :] if is_sum else None
    return _GradientBucket(layout, exchange, exchange.init(layout), bucket, views, flat, behind)


def _summed(slot: _GradientBucket) -> Rounds:
    """The sum of a bucket and its tail over all ranks, in place."""
    (found,) = yield Message((slot.whole,), Collective.SUM)
    if found.data_ptr() != slot.whole.data_ptr():
        slot.whole.copy_(found)
    return Outcome(slot.bucket.flat, None, slot.state if slot.pending is None else slot.pending)


@dataclass(frozen=True, slots=True)
class _Looker:
    passes: weakref.ref[BackwardPasses]

    def __call__(self, asked: BackwardCall) -> None:
        if (passes := self.passes()) is not None:
            passes.asked(asked)


@dataclass(frozen=True, slots=True)
class _Before:
    """Called by the engine before it adds to a parameter's gradient, and never by torch.autograd.grad."""

    passes: weakref.ref[BackwardPasses]
    name: str

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if (passes := self.passes()) is None:
            raise BadInput(
                f"{self.name} is trained, and the model that was given to gossamer.wrap is gone: keep it as long as "
                "its parameters are trained"
            )
        with passes.answered():
            changed = passes.before(self.name, gradients[0])
        return None if changed is None else (changed,)


@dataclass(frozen=True, slots=True)
class _After:
    passes: weakref.ref[BackwardPasses]
    name: str

    def __call__(self, param: Tensor) -> None:
        if (passes := self.passes()) is not None:
            with passes.answered():
                passes.after(self.name, param)


@dataclass(frozen=True)
class _Ending:
    """Called by the engine when a graph's work is done. It goes, uncalled, with a graph that failed."""

    passes: weakref.ref[BackwardPasses]

    def __call__(self) -> None:
        if (passes := self.passes()) is not None:
            with passes.answered():
                passes.end()


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Somebody's hook on a parameter's gradient: it is to see the gradient of the whole batch, and waits for it."""

    on_mean: Callable[[Tensor], Tensor | None]

    def __call__(self, gradient: Tensor) -> None:
        return None


def _let_go(param: nn.Parameter) -> None:
    """A parameter that was wrapped before is the later wrap's."""
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    for one in {hook for hook in (hooks or {}).values() if isinstance(hook, _After)}:
        if (before := one.passes()) is not None:
            before.close()


def _refuse_after_hooks(name: str, param: Tensor, ours: int) -> None:
    if len(param._post_accumulate_grad_hooks or ()) > ours:  # type: ignore[attr-defined]
        raise BadInput(
            f"{name} has a hook after its gradient is accumulated, which would see this rank's own gradient: "
            "work on .grad after backward, where it is the mean of all ranks"
        )


def _defer_hooks(param: nn.Parameter) -> None:
    hooks = param._backward_hooks
    for key, hook in list(hooks.items()) if hooks else ():
        if not isinstance(hook, _Deferred):
            hooks[key] = _Deferred(hook)  # type: ignore[index]
