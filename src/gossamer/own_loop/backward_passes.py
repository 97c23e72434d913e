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

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm.channel import Channel
from gossamer.comm.comm_thread import CommThread
from gossamer.loss_reader.count import LossCount
from gossamer.ops.fingerprint import digest
from gossamer.own_loop.backward_pass import BackwardPass, PassSettings
from gossamer.own_loop.bucket_exchange import BucketSender
from gossamer.own_loop.exchange_choice import Found, PassProfile
from gossamer.own_loop.gradient_buckets import LoopBuckets
from gossamer.own_loop.gradient_hooks import (
    GradientHooks,
    LossHook,
    PassEnding,
    PassEvents,
    defer_hooks,
    refuse_after_hooks,
)
from gossamer.own_loop.learning_rates import LearningRates
from gossamer.own_loop.losses import BackwardCall, watched
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.pass_status import PassStatus
from gossamer.own_loop.process_group import LoopGroup
from gossamer.own_loop.status_rows import BACKWARD, CHOICE, TAKEN, TOLD, Deferred, StatusRow, StatusRows
from gossamer.own_loop.trained_parameters import TrainedParameters
from gossamer.own_loop.user_gradients import UserGradients
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges

AUTO = "auto"
_SKIPPED = 40  # passes in a row: more than a GradScaler skips before it has found its scale
_log = logging.getLogger(__name__)


class BackwardPasses:
    """The gradient averaging of one model: handles all backward passes over its trained parameters on one of several
    ranks.

    `trained` names the parameters, in the order in which a forward pass uses them. Raises BadInput if a pass cannot be
    exact, WireMismatch if ranks are at different points of their loops, PeerLost if a rank does not come.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        exchanges: Exchanges,
        party: LoopGroup,
        pump: CommThread,
        words: Channel,
        hand: PassInputs,
        manner: PassSettings,
    ) -> None:
        """Bucket the parameters and register hooks on them.

        `words`: a second channel, for status rows and marks, on which the calling thread itself sends.
        """
        self.trained, self.pump, self.hand, self.manner = trained, pump, hand, manner
        self._clock = party.clock
        self._watch = PassProfile(party.clock, lossy=manner.lossy) if exchanges == AUTO else None
        written = "dense" if exchanges == AUTO else exchanges
        self._buckets = LoopBuckets(pump.channel, trained, written, manner.bucket_bytes)
        self._gradients, self._hooks = UserGradients(self._buckets), GradientHooks()
        self._status = PassStatus(words, party, hand)
        self._exchange = BucketSender(self._buckets, self._status, pump, party, manner)
        if self._watch is not None:
            self._exchange.sees = self._watch.see
        self.is_closed = False  # whether another wrap has taken the parameters over, or the model was let go
        self.is_released = False
        self._undo: list[Callable[[], None]] = []
        self.serial = 0  # number of the last pass
        self.skipped = 0  # passes in a row without a step
        self._deferred: Deferred | None = None
        self._counted: LossCount | None = None
        self._roots: tuple[Tensor, ...] = ()
        self._pass: BackwardPass | None = None
        self._grouped = 0  # passes in the group
        self._quiet = 0  # depth of no_sync
        self.take_in(trained.new({}))
        unlook = watched().look(LossHook(weakref.ref(self)))
        self.at_close(unlook)
        weakref.finalize(self, unlook)

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return self._buckets.params

    @property
    def has_exchange_state(self) -> bool:
        """Return whether an exchange carries a state from step to step."""
        return self._buckets.remembers

    @property
    def is_held(self) -> bool:
        """Return whether gradients of a group wait for the group's last pass."""
        return bool(self._gradients.held)

    def is_finite(self, optimizer: Optimizer) -> bool:
        """Return whether this rank's last losses, and what it gave to the gradients of `optimizer`, are finite."""
        return all(bool(torch.isfinite(one)) for one in (*self._roots, *self._buckets.own_sums(optimizer)))

    @property
    def may_keep_residuals(self) -> bool:
        """Return whether an exchange carries a state from step to step, or `exchange="auto"` may still choose one."""
        return self.has_exchange_state or (self._watch is not None and self._watch.lossy)

    def follow_rates(self, rates: LearningRates) -> None:
        """Take the learning rates of the steps, which error feedback needs, from `rates`."""
        self._exchange.rates = rates

    def _take_in_later(self, params: Mapping[str, nn.Parameter]) -> None:
        """Add parameters that were unfrozen or given to an optimizer since the last pass. Raises BadInput if their
        values differ between ranks.
        """
        found = float(digest(list(params.values()), len(params)) % 2**52)
        beside = (found, float(len(params)))
        doing = "the registration of parameters that were unfrozen or added"
        rows = self.gathered(StatusRow(TAKEN, self.serial, beside=beside), doing)
        if len({tuple(row) for row in rows.beside.tolist()}) > 1:
            raise BadInput(
                f"parameters {', '.join(params)} were unfrozen or added after gossamer.wrap, and their values differ "
                "between ranks: create them from the same seed on all ranks"
            )
        self.take_in(params)

    def take_in(self, params: Mapping[str, nn.Parameter]) -> None:
        """Bucket and hook newly trained parameters. All ranks must pass the same ones in the same order."""
        self._buckets.add(params)
        self._hooks.add(params, weakref.ref(self))

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
        with self._status.answered(doing or f"backward pass {self.serial}"):
            yield

    # Called by the autograd engine.

    def asked(self, asked: BackwardCall) -> None:
        """Read the loss denominators of a backward call that is about to run, and take in newly trained parameters."""
        if self.is_closed:
            return
        if new := self.trained.new(self._buckets.params):
            self._take_in_later(new)
        mine: weakref.ref[PassEvents] = weakref.ref(self)
        for param in self._buckets.params.values():
            defer_hooks(param, mine)
        self._counted = None
        if self.manner.loss.reads_graph:
            with self._clock.stopped():  # only the first steps look through a loss's graph
                self._counted = asked.counted(self.hand)
        self._roots = tuple(root.detach().sum() for root in asked.roots)
        if self._watch is not None:
            self._watch.ask()

    def before(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Prepare `.grad` for a gradient of `name` that is about to be added; return the gradient to add in its place,
        if weighted.
        """
        one = self._opened(name)
        self._gradients.take(name)
        one.touched.add(name)
        if one.is_grouped and gradient is not None and (weight := self._status.weight(one)) != 1.0:
            return gradient * weight
        return None

    def after(self, name: str, param: Tensor) -> None:
        """Copy a gradient of `name` that has arrived into its bucket, and send the bucket if it is full.

        Raises BadInput if the parameter was replaced, or its gradient has a graph.
        """
        one, new = self._pass, param.grad
        if one is None or name not in one.touched or new is None:
            raise BadInput(
                f"parameter {name} was replaced after gossamer.wrap (its dtype or device changed, now {param.dtype} on "
                f"{param.device}): convert and move the model before you call gossamer.wrap"
            )
        if new.requires_grad:
            raise BadInput(
                f"backward(create_graph=True) gives parameter {name} a gradient with an autograd graph, but the mean "
                "over ranks has none: call torch.autograd.grad(loss, ..., create_graph=True), then backward()"
            )
        refuse_after_hooks(name, param, 1)
        slot = self._buckets.slot_of(name)
        view = slot.views[name]
        with torch.no_grad():
            if one.is_grouped and self._status.weight(one) == 0.0:
                new = None  # a rank whose loss counts nothing may have nan
            if name in self._gradients.held:
                view.add_(new) if new is not None else None
            elif new is None:
                view.zero_()
            elif new.layout != torch.strided:
                view.zero_().add_(new)
            else:
                view.copy_(new)
        if self._watch is not None and one.exchanging is not None:
            self._watch.arrive(name)
        self._gradients.give(name)
        one.arrived.add(name)
        slot.waits -= 1
        if slot.waits == 0 and one.exchanging is not None:
            self._exchange.send(one, self._buckets.index_of(name), self._gradients.held)

    def end(self) -> None:
        """Finish the current pass, if there is one, after the engine has run all of a graph."""
        one, self._pass = self._pass, None
        if one is None:
            return
        try:
            if one.exchanging is None:
                self._hold(one)
            else:
                self._average(one)
        except BaseException:
            self._drop(one)
            raise

    # One pass.

    def share(self) -> float:
        """Return the weight of this rank's gradient in the mean of the current pass. Starts a pass if there is none."""
        return self._status.rows(self._opened("")).share

    def _opened(self, name: str) -> BackwardPass:
        """Return the pass that a gradient of `name` belongs to; "" for a caller before any gradient. Starts one if
        needed.
        """
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        one = self._pass
        if one is not None and all(ending() is None for ending in one.endings.values()):
            self._drop(one)
            raise BadInput(
                f"backward pass {one.row.serial} ended with an exception on this rank, and the other ranks wait for "
                "its gradients: let that exception end the script, or check the batch and the loss before backward()"
            )
        if one is not None and name in one.touched:  # the nested pass of activation checkpointing reaches it again
            self.end()
            one = None
        if one is None:
            one = self._pass = self._open()
        if task not in one.endings:
            ending = PassEnding(weakref.ref(self))
            torch.autograd.Variable._execution_engine.queue_callback(ending)  # type: ignore[attr-defined]
            one.endings[task] = weakref.ref(ending)
        return one

    def _open(self) -> BackwardPass:
        self._give_up_if_dropped()
        self.serial += 1
        self._grouped += 1
        is_held = self._is_held_back()
        counted = self.hand.counted(self._counted, self.manner.loss)
        deferred, self._deferred = self._deferred, None
        told = deferred.told if deferred is not None else (0.0,) * TOLD
        beside = (float(len(self._buckets.params)), *told, float(is_held))
        row = StatusRow.of(BACKWARD, self.serial, counted, self.hand.mark, beside=beside)
        weighing = self._status.start(row)
        exchanging = None if is_held else self._exchange.begin()
        if self._watch is not None and exchanging is not None:
            self._watch.turn(is_asked=watched().running > 0)
        for slot in self._buckets.slots:
            slot.open()
        self._buckets.leave_kept(self._gradients.held)
        return BackwardPass(row, weighing, exchanging, is_held or self._grouped > 1, {}, deferred)

    def _is_held_back(self) -> bool:
        """Return whether the gradients of the pass that begins wait for others of its group.

        A user's hook on a parameter would see the sum of a group once, and not each gradient of it, so where there are
        hooks every pass is exchanged. Raises BadInput for a hook that comes when a group has begun.
        """
        is_held = bool(self._quiet) or (self._grouped < self.manner.accumulate and not self.hand.is_last)
        hooked = next((name for name, param in self._buckets.params.items() if param._backward_hooks), None)
        if hooked is not None and self._gradients.held:
            raise bad_input(
                wanted="hooks on parameters (param.register_hook) before the first of the backward passes whose "
                "gradients are averaged in one exchange (accumulate=, model.no_sync())",
                got=f"one on parameter {hooked} between two of them",
                do="register it before the first one, or after the last one",
            )
        return is_held and hooked is None

    def _hold(self, one: BackwardPass) -> None:
        """End a pass whose gradients wait for others of its group."""
        self._status.rows(one)
        self._gradients.held |= one.arrived

    def _average(self, one: BackwardPass) -> None:
        """End a pass whose gradients are averaged over ranks."""
        if self._watch is not None:
            self._watch.end()
        with self._clock.stopped():
            self._exchange_rest(one)
        self._gradients.held, self._grouped = set(), 0

    def _exchange_rest(self, one: BackwardPass) -> None:
        """Send what the pass has not sent yet, wait for the means, and write them to `.grad`."""
        self._status.rows(one)
        params, held = self._buckets.params, self._gradients.held
        mine = one.arrived | {name for name in held if self._buckets.is_view(name, params[name].grad)}
        for name in params:
            if name not in one.touched and name not in mine:
                self._gradients.set_aside(name)
                self._buckets.slot_of(name).views[name].zero_()
        for index, slot in enumerate(self._buckets.slots):
            if not slot.sent:
                self._exchange.send(one, index, self._gradients.held)
        anywhere = self._exchange.take_means(one, mine)
        with torch.no_grad():
            for name in params:
                self._gradients.put(name, had=anywhere[name])

    def _drop(self, one: BackwardPass) -> None:
        """Abandon a pass: its exchanges are dropped, and no state has changed."""
        self._pass = None
        if one.exchanging is not None:
            one.exchanging.drop()

    # The step.

    def check_apart(self, optimizer: Optimizer) -> None:
        """Raise BadInput if a step of `optimizer` has no exchange states of its own."""
        self._buckets.check_apart(optimizer)

    def commit(self, optimizer: Optimizer) -> None:
        """Commit the pending exchange states of the gradients of `optimizer` after its step took effect."""
        self._buckets.commit(optimizer)
        self.skipped = 0
        is_new = self._exchange.count_step()
        if self._watch is not None:
            self._profiled(self._watch, is_new=is_new)

    def _profiled(self, watch: PassProfile, *, is_new: bool) -> None:
        """Choose an exchange if all ranks have profiled the step that was committed, else profile the next one.

        `is_new`: whether passes were exchanged since the committed step before. All ranks commit the same steps, so all
        of them meet here.
        """
        if not watch.has_begun or not is_new:
            watch.begin()
            return
        at = f"the choice of an exchange after optimizer.step() {self._exchange.steps}"
        rows = self.gathered(StatusRow(CHOICE, self.serial, beside=(float(watch.found),)), at)
        if watch.is_enough(Found(int(rows.beside[:, 0].max()))):
            with self.answered(at), self._clock.stopped():
                chosen = watch.choose(self._buckets.params, self.pump)
            self._watch = self._exchange.sees = None
            self._buckets.rebuild(chosen.exchange, chosen.buckets, chosen.turns)
        elif watch.is_vain:
            self._keep_dense(
                f"after {self._exchange.steps} optimizer steps, backward passes still do not go through "
                "torch.autograd.backward, where their time begins. Call loss.backward()"
            )
        else:
            watch.begin()

    def _keep_dense(self, why: str) -> None:
        """End the profile of a loop that has no step to profile: its exchange stays as it began."""
        self._watch = self._exchange.sees = None
        if self.pump.channel.rank == 0:
            _log.warning("exchange: all-reduce, as exchange='auto' found no step to choose from: %s", why)

    def reject(self, optimizer: Optimizer) -> None:
        """Drop the pending exchange states of the gradients of `optimizer` after its step did not take effect."""
        self._buckets.reject(optimizer)
        if self._watch is not None:
            self._watch.drop()

    def _give_up_if_dropped(self) -> None:
        """Reject the passes whose gradients the user has dropped or zeroed without a step."""
        if self._gradients.held or not self._buckets.give_up(is_watched=self._watch is not None):
            return
        if self._watch is not None:
            self._watch.drop()
        self.skipped += 1
        if self._watch is not None and self.skipped > _SKIPPED:
            self._keep_dense(f"{self.skipped} backward passes in a row had no step of the wrapped optimizer")
        if self.has_exchange_state and self.skipped > _SKIPPED:
            raise BadInput(
                f"{self.skipped} backward passes without a step of the wrapped optimizer: the exchange's residuals "
                "would never be sent. Call step() of that optimizer, or use an exchange without residuals (dense)"
            )

    def defer(self, deferred: Deferred) -> bool:
        """Send `deferred` with the next pass's status row; return False if another one is already waiting."""
        is_free = self._deferred is None
        self._deferred = deferred if is_free else self._deferred
        return is_free

    def gathered(self, row: StatusRow, doing: str) -> StatusRows:
        """All-gather a status row outside of the passes and return all ranks' rows. Raises as a pass does."""
        return self._status.gathered(row, doing)

    def whole(self, loss: Tensor | float) -> Tensor | float:
        """Return the loss of the global batch from the ranks' own losses of the last pass. All ranks must call it."""
        return self._status.whole(loss, self.serial)

    def at_close(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the wrap is closed."""
        self._undo.append(undo)

    def close(self) -> None:
        """Undo what the wrap has done to parameters, layers and model, as another wrap takes the parameters over."""
        self.is_closed = True
        self._hooks.remove()
        while self._undo:
            self._undo.pop()()

    def release(self) -> None:
        """Close the wrap for good: gradients and steps are this process's own again."""
        self.close()
        self.is_released = True
