"""Gradient averaging for the user's own loop: `backward()` returns with the mean gradient of all ranks in `.grad`.

    pass     the first gradient starts it: the ranks all-gather a status row (serial, loss denominator, batch);
             gradients are copied into buckets as they arrive, and full buckets are sent
    end      a callback that the autograd engine runs after the pass: the other buckets are sent in the declared order;
             one message says which parameters had a gradient on any rank; the means are written to `.grad`

The previous content of `.grad` is set aside and added afterwards. So k passes before a step cost k exchanges and give
the sum of k means, as in one process. With `accumulate` or `no_sync`, gradients are weighted as they arrive and the
last pass of the group sends their sum. Exchange states stay pending until `commit`. A step that never came (a
GradScaler that skipped it, gradients that were zeroed) leaves them unchanged.
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
from gossamer.own_loop.exchange_choice import WATCHED, PassProfile
from gossamer.own_loop.losses import BackwardCall, watched
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.process_group import LoopGroup
from gossamer.own_loop.status_rows import BACKWARD, LOSS, TAKEN, TOLD, Deferred, StatusRow, StatusRows
from gossamer.own_loop.trained_parameters import TrainedParameters
from gossamer.spec.errors import BadInput, PeerLost
from gossamer.spec.method_config import Exchanges
from gossamer.sync import buckets_of

AUTO = "auto"
_SMALL_BYTES = 256 << 10  # below this, a message's latency costs more than its bytes
_SKIPPED = 40  # passes in a row: more than a GradScaler skips before it has found its scale


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """The settings of a loop's gradient averaging. `loss`: "read" from the autograd graph, "mean" over the weight of a
    batch, or "sum".
    """

    accumulate: int = 1
    loss: str = "read"
    seed: int = 0
    lossy: bool = False  # whether exchange="auto" may choose a lossy one
    scale: Callable[[], float] | None = None  # the GradScaler's current loss scale
    bucket_bytes: int = 25 << 20


@dataclass(slots=True)
class _GradientBucket:
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


@dataclass(frozen=True, slots=True)
class _Earlier:
    """The content of `.grad` before a pass; a copy, if it was the bucket's own view."""

    gradient: Tensor
    was_view: bool


@dataclass(slots=True)
class _Pass:
    """A backward pass in progress. The engine keeps each callback of `endings` alive until it calls or drops it."""

    row: StatusRow
    weighing: Pending
    exchanging: CommStep | BlockingExchange | None  # None: a pass of a group before its last
    is_grouped: bool
    endings: dict[int, weakref.ref[_Ending]]
    deferred: Deferred | None = None  # of the previous step
    touched: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    rows: StatusRows | None = None


class BackwardPasses:
    """The gradient averaging of one model: handles all backward passes over its trained parameters on one of several
    ranks.

    `trained` names the parameters, in the order in which a forward pass uses them. Raises BadInput if a pass cannot be
    exact, WireMismatch if ranks are at different points of their loops, PeerLost if a rank does not come.
    """

    def __init__(
        self, trained: TrainedParameters, exchanges: Exchanges, party: LoopGroup, pump: CommThread, words: Channel,
        hand: PassInputs, manner: PassSettings,
    ) -> None:  # fmt: skip
        """Bucket the parameters and register hooks on them.

        `words`: a second channel, for status rows and marks, on which the calling thread itself sends.
        """
        self.trained, self.party, self.pump, self.hand, self.manner = trained, party, pump, hand, manner
        self._words = words
        self._watch = PassProfile(lossy=manner.lossy) if exchanges == AUTO else None
        self._rules = exchange_methods.rules("dense" if exchanges == AUTO else exchanges, key="exchange")
        self._bucket_bytes = manner.bucket_bytes
        self.is_closed = False
        self.serial = 0  # number of the last pass
        self.rate: Callable[[], float] = lambda: 1.0  # learning rate, for error feedback
        self.skipped = 0  # passes in a row without a step
        self.last: StatusRows | None = None  # of the last pass
        self._deferred: Deferred | None = None
        self._counted: LossCount | None = None
        self._roots: tuple[Tensor, ...] = ()
        self._sums: list[Tensor] = []
        self._pass: _Pass | None = None
        self._held: set[str] = set()  # parameters with gradients of an unsent group
        self._grouped = 0  # passes in the group
        self._quiet = 0  # depth of no_sync
        self._earlier: dict[str, _Earlier] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._nodes: list[torch.autograd.graph.Node] = []
        self._slots: list[_GradientBucket] = []
        self._params: dict[str, nn.Parameter] = {}
        first = trained.new({})
        self._rules.by_name(first)  # reports rules that match no parameter
        self.take_in(first)
        weakref.finalize(self, watched().look(_Looker(weakref.ref(self))))

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return self._params

    @property
    def is_held(self) -> bool:
        """Return whether gradients of a group wait for the group's last pass."""
        return bool(self._held)

    @property
    def is_finite(self) -> bool:
        """Return whether this rank's last losses, and its own gradients since the last step, are finite."""
        return all(bool(torch.isfinite(one)) for one in (*self._roots, *self._sums))

    def _take_in_later(self, params: Mapping[str, nn.Parameter]) -> None:
        """Add parameters that were unfrozen or given to an optimizer since the last pass. Raises BadInput if their
        values differ between ranks.
        """
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
        """Bucket and hook newly trained parameters. All ranks must pass the same ones in the same order."""
        self._lay_out(params)
        for name, param in params.items():
            _let_go(param)
            _refuse_after_hooks(name, param, 0)
            self._hook(name, param)

    def _lay_out(self, params: Mapping[str, nn.Parameter]) -> None:
        """Append buckets for the parameters behind the existing buckets."""
        exchanges = {name: self._rules.of(name) for name in params}
        for layout, exchange in _without_small(buckets_of(params, exchanges, bucket_bytes=self._bucket_bytes), params):
            exchange.check(layout, self.pump.channel.levels)
            self._slots.append(_slot(layout, exchange))
        self._params |= params
        self._slot_of = {e.name: i for i, slot in enumerate(self._slots) for e in slot.layout.entries}
        self._place = {name: index for index, name in enumerate(self._params)}
        self.remembers = any(True for slot in self._slots for _ in slot.state.flatten())  # states across steps
        levels, rank = self.pump.channel.levels, self.party.rank
        self._rounds = [len(s.exchange.traffic(s.layout, levels, rank)) for s in self._slots]

    def _hook(self, name: str, param: nn.Parameter) -> None:
        with torch.enable_grad():
            node = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert node is not None
        self._nodes.append(node)  # a parameter holds its node weakly, and a freed node loses its hooks
        me = weakref.ref(self)
        self._handles.append(node.register_prehook(_Before(me, name)))
        self._handles.append(param.register_post_accumulate_grad_hook(_After(me, name)))  # type: ignore[no-untyped-call]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Group the passes inside with the next one that follows, which sends the sum of all."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @contextmanager
    def answered(self, doing: str = "") -> Iterator[None]:
        """Convert a PeerLost raised inside into one that names the missing ranks and `doing`."""
        try:
            yield
        except PeerLost as error:
            raise self.party.lost(error, doing or f"backward pass {self.serial}") from None

    # Called by the autograd engine.

    def asked(self, asked: BackwardCall) -> None:
        """Read the loss denominators of a backward call that is about to run, and take in newly trained parameters."""
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
        """Prepare `.grad` for a gradient of `name` that is about to be added; return the gradient to add in its place,
        if weighted.
        """
        one = self._opened(name)
        param = self._params[name]
        if name not in self._held or not self._is_view(name, param.grad):
            self._set_aside(name)
        one.touched.add(name)
        param.grad = None  # so that autograd stores this pass's gradient alone
        if one.is_grouped and gradient is not None and (weight := self._weight(one)) != 1.0:
            return gradient * weight
        return None

    def after(self, name: str, param: Tensor) -> None:
        """Copy a gradient of `name` that has arrived into its bucket, and send the bucket if it is full.

        Raises BadInput if the parameter was replaced, or its gradient has a graph.
        """
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
                new = None  # a rank whose loss counts nothing may have nan
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
        """Finish the current pass, if there is one, after the engine has run all of a graph."""
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
        """Return the weight of this rank's gradient in the mean of the current pass. Starts a pass if there is none."""
        return self._rows(self._opened("")).share

    def _opened(self, name: str) -> _Pass:
        """Return the pass that a gradient of `name` belongs to; "" for a caller before any gradient. Starts one if
        needed.
        """
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        one = self._pass
        if one is not None and all(ending() is None for ending in one.endings.values()):
            self._drop(one)
            raise BadInput(
                f"backward pass {one.row.serial} ended with an exception on this rank, and the others wait for its "
                "gradients: end the script, or catch what is wrong before backward is called"
            )
        if one is not None and name in one.touched:  # the nested pass of activation checkpointing reaches it again
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
        """Return the sender of a pass's buckets, which sends in the same order on all ranks."""
        if all(rounds == 1 for rounds in self._rounds):
            return BlockingExchange(self.pump.channel)
        return self.pump.begin(self._rounds)

    def _rows(self, one: _Pass) -> StatusRows:
        """Return all ranks' status rows of this pass. Waits for the last one; raises if they are inconsistent."""
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
        """Return the weight of a gradient of a group, whose sum over ranks is averaged with equal weights."""
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
                flat.zero_()  # a rank whose loss counts nothing may have nan
        self._sums.append(flat.sum())
        if (scale := self._scale(slot)) != 1.0:
            flat.mul_(1.0 / scale)
        key, levels = (self.manner.seed, self.serial), self.pump.channel.levels
        at = ExchangeContext(self.party.rank, levels, weights, key, self.rate(), accounts=False)
        state = slot.state if slot.pending is None else slot.pending
        one.exchanging.submit(index, slot.exchange.run(slot.bucket, state, at))

    def _count_in(self, one: _Pass, slot: _GradientBucket, tail: Tensor) -> None:
        """Multiply a bucket by this rank's loss denominator, and write that and the parameters' marks into its tail."""
        counted = one.row.counted
        count = 1.0 if one.is_grouped or not counted.counts else max(0.0, counted.counts[0])
        if count == 0.0:
            slot.bucket.flat.zero_()  # a rank whose loss counts nothing may have nan
        elif count != 1.0:
            slot.bucket.flat.mul_(count)
        had = [float(entry.name in one.arrived or entry.name in self._held) for entry in slot.layout.entries]
        tail.copy_(torch.tensor([count, *had], dtype=tail.dtype))

    def _scale(self, slot: _GradientBucket) -> float:
        """Return the loss scale that gradients are divided by, so that residuals have no scale."""
        keeps = self.manner.scale is not None and any(True for _ in slot.state.flatten())
        return self.manner.scale() if keeps and self.manner.scale is not None else 1.0

    def _hold(self, one: _Pass) -> None:
        """End a pass whose gradients wait for others of its group."""
        self._rows(one)
        self._held |= one.arrived

    def _exchange(self, one: _Pass, exchanging: CommStep | BlockingExchange) -> None:
        """End a pass whose gradients are averaged over ranks."""
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
        """Turn a bucket's sum of gradients times denominators into the gradient of the global batch."""
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
        """Write the mean of one parameter to `.grad`, and add the earlier content."""
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
            param.grad = earlier.gradient.add_(view)  # keep the user's own tensor as `.grad`

    def _set_aside(self, name: str) -> None:
        """Save the content of `.grad` before the bucket is written."""
        grad = self._params[name].grad
        if grad is None:
            self._earlier.pop(name, None)
            self._held.discard(name)  # the user dropped the group's gradients
        elif not self._is_view(name, grad):
            self._earlier[name] = _Earlier(grad, was_view=False)
            self._held.discard(name)
        elif name not in self._held:
            self._earlier[name] = _Earlier(grad.detach().clone(), was_view=True)

    def _is_view(self, name: str, grad: Tensor | None) -> bool:
        return grad is not None and grad.data_ptr() == self._slots[self._slot_of[name]].views[name].data_ptr()

    def _drop(self, one: _Pass) -> None:
        """Abandon a pass: its exchanges are dropped, and no state has changed."""
        self._pass = None
        if one.exchanging is not None:
            one.exchanging.drop()

    # The step.

    def commit(self) -> None:
        """Commit the pending exchange states after a step that took effect."""
        for slot in self._slots:
            slot.state, slot.pending = (slot.state if slot.pending is None else slot.pending), None
        self.skipped = 0
        self._sums = []
        self._choose()

    def _choose(self) -> None:
        """Choose an exchange after a step, once a pass was profiled; before that, record when the next step begins."""
        if self._watch is None:
            return
        if self.serial < WATCHED:
            self._watch.began_s = time.perf_counter()
            return
        chosen = self._watch.choose(self._params, self.pump, self.manner.bucket_bytes)
        self._watch = None
        self._rules, self._bucket_bytes = exchange_methods.rules(chosen.exchange, key="exchange"), chosen.bucket_bytes
        self._slots = []  # `.grad` tensors no longer belong to a bucket
        self._lay_out(self._params)

    def reject(self) -> None:
        """Drop the pending exchange states after a step that did not take effect."""
        for slot in self._slots:
            slot.pending = None
        self._sums = []

    def _give_up_if_dropped(self) -> None:
        """Reject the passes whose gradients the user has dropped or zeroed without a step."""
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
        """Send `deferred` with the next pass's status row; return False if another one is already waiting."""
        is_free = self._deferred is None
        self._deferred = deferred if is_free else self._deferred
        return is_free

    def gathered(self, row: StatusRow, doing: str) -> StatusRows:
        """All-gather a status row outside of the passes and return all ranks' rows. Raises as a pass does."""
        with self.answered(doing):
            (told,) = self._words.start(Message((row.tensor(),), Collective.GATHER)).wait()
        rows = StatusRows.of(told, self.party.rank, row)
        rows.check()
        return rows

    def whole(self, loss: Tensor | float) -> Tensor | float:
        """Return the loss of the global batch from the ranks' own losses of the last pass. All ranks must call it."""
        mine = float(loss)
        rows = self.gathered(StatusRow(LOSS, self.serial, beside=(mine,)), "a closure of optimizer.step()")
        shares, factor = (self.last.shares, self.last.factor) if self.last is not None else (rows.shares, 1.0)
        values = torch.where(shares > 0, rows.beside[:, 0], 0.0)
        value = float((values * shares).sum()) * factor
        return torch.full_like(loss.detach(), value) if isinstance(loss, Tensor) else value

    def close(self) -> None:
        """Remove all hooks, as another wrap has taken over the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes, self.is_closed = [], [], True


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


def _slot(layout: Layout, exchange: Exchange) -> _GradientBucket:
    """Return a zeroed bucket, with a tail if its exchange is a plain sum."""
    is_sum = isinstance(exchange, Dense) and layout.dtype in (torch.float32, torch.float64)
    tail = 1 + len(layout.entries) if is_sum else 0
    flat = torch.zeros(layout.numel + tail, dtype=layout.dtype, device=layout.device)
    bucket = Bucket(layout, flat[: layout.numel])
    views, behind = dict(bucket.slices()), flat[layout.numel :] if is_sum else None
    return _GradientBucket(layout, exchange, exchange.init(layout), bucket, views, flat, behind)


def _summed(slot: _GradientBucket) -> Rounds:
    """Sum a bucket and its tail over all ranks, in place."""
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
    """The hook that the engine calls before it adds to a parameter's gradient; torch.autograd.grad never calls it."""

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
    """The callback that the engine calls after a graph; a graph that fails drops it uncalled."""

    passes: weakref.ref[BackwardPasses]

    def __call__(self) -> None:
        if (passes := self.passes()) is not None:
            with passes.answered():
                passes.end()


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A user's hook on a parameter's gradient, deferred until the gradient of the global batch is known."""

    on_mean: Callable[[Tensor], Tensor | None]

    def __call__(self, gradient: Tensor) -> None:
        return None


def _let_go(param: nn.Parameter) -> None:
    """Close the earlier wrap of a parameter that is wrapped again."""
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
