"""Choice of the gradient exchange for `exchange="auto"` in the user's own loop: profile a step with all-reduce, then
choose.

`gossamer train` profiles a step before its first one. The user's loop cannot be run twice, so one of its own steps is
profiled while it is made: from the end of a committed step, which warms up, to the end of the last backward call whose
gradients were exchanged before the next committed step. All backward passes in between count as computing, those of
micro-batches too, and waits for other ranks do not; `ready_s` and the gradients are those of the last call. Where
several calls exchange gradients, each of them counts as a step, of as long a part of the computing. Every rank tells
what it has profiled. Once all have a step, the links are probed and the same policy chooses from the same measurements.
All ranks hold the same numbers, so they choose alike.

A step in which gradients were dropped (a GradScaler that skipped it, a rejected step) took longer than others do, so
the next one is profiled. A loop that drops gradients in every step (LBFGS, the discriminator of a GAN) has no other
steps, so after a few of them one is profiled as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.link_use import LARGEST_BUCKET_BYTES
from gossamer.autotune.message_price import message_price
from gossamer.autotune.same_arithmetic import UNLIKE, computes_alike
from gossamer.comm import slow_start
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.link_probe import probe
from gossamer.own_loop.compute_clock import ComputeClock
from gossamer.plan.exchange import CANDIDATES, alike_anywhere, choose
from gossamer.run.profile_step import StepProfile
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import Exchanges

_TRIED = 3  # committed steps after the first: if a loop drops gradients in each of them, it does so in all
_log = logging.getLogger(__name__)


class Found(IntEnum):
    """What a rank has found in a step; of several ranks the largest counts.

    UNSEEN: the start of the last backward pass is unknown, as its call did not go through torch.autograd.backward.
    """

    WHOLE = 0
    DROPPED = 1
    UNSEEN = 2


@dataclass(frozen=True, slots=True)
class ExchangeChoice:
    """The exchange that all ranks have chosen, the parameters of each bucket, and the bucket of each turn."""

    exchange: Exchanges
    buckets: tuple[tuple[str, ...], ...]
    turns: tuple[int, ...]


@dataclass(slots=True)
class _SeenStep:
    """What was seen of a step that began at `began_s`. `turned_s`: start of the backward call whose gradients were
    exchanged last, None if unknown; `passes`: the number of those calls. `dropped`: whether gradients of the step were
    dropped.
    """

    began_s: float
    turned_s: float | None = None
    passes: int = 0
    ended_s: float = 0.0
    dropped: bool = False
    ready_s: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class PassProfile:
    """The profile of a step on one rank, and the choice that is made from it. `clock`: of this rank's own work."""

    def __init__(self, clock: ComputeClock, *, lossy: bool) -> None:
        self.lossy = lossy
        self._clock = clock
        self._asked_s = 0.0  # start of the last backward call, of any loss
        self._step: _SeenStep | None = None
        self._tried = 0  # steps that were profiled in vain

    # A step, as it is made.

    def ask(self) -> None:
        """Take note that a backward call begins, which may reach the model or not."""
        _settle()
        self._asked_s = self._clock.now_s()

    def turn(self, *, is_asked: bool) -> None:
        """Take note that the first gradient of a pass arrives that is to be exchanged.

        `is_asked`: whether a backward call runs that was seen to begin. The passes of one call (activation checkpoints
        make several) count as one.
        """
        if (step := self._step) is None:
            return
        turned_s = self._asked_s if is_asked and self._asked_s >= step.began_s else None
        if turned_s is None or turned_s != step.turned_s:
            step.turned_s, step.ready_s, step.gradients = turned_s, {}, {}
            step.passes += 1

    def arrive(self, name: str) -> None:
        """Take note that a gradient of this rank is complete."""
        if (step := self._step) is not None and step.turned_s is not None:
            step.ready_s[name] = self._clock.now_s() - step.turned_s

    def see(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy the gradients of a bucket that is about to be sent."""
        if (step := self._step) is None:
            return
        with self._clock.stopped():
            for name, view in gradients.items():
                known = step.gradients.get(name)
                step.gradients[name] = view.detach().clone() if known is None else known.add_(view)

    def end(self) -> None:
        """Take note that all gradients of this rank are complete."""
        if self._step is not None:
            _settle()
            self._step.ended_s = self._clock.now_s()

    def drop(self) -> None:
        """Take note that gradients were dropped without a step."""
        if self._step is not None:
            self._step.dropped = True

    # Between two steps.

    @property
    def has_begun(self) -> bool:
        """Return whether a step is being profiled."""
        return self._step is not None

    def begin(self) -> None:
        """Begin with the step that follows, after a committed one."""
        _settle()
        self._step = _SeenStep(self._clock.now_s())

    @property
    def found(self) -> Found:
        """Return what was found in the step that was just committed."""
        if self._step is None or self._step.turned_s is None:
            return Found.UNSEEN
        return Found.DROPPED if self._step.dropped else Found.WHOLE

    def is_enough(self, found: Found) -> bool:
        """Return whether to choose from the step, of which `found` was found on all ranks; else it counts as tried."""
        self._tried += 1
        return found is Found.WHOLE or (found is Found.DROPPED and self._tried >= _TRIED)

    @property
    def is_vain(self) -> bool:
        """Return whether so many steps were profiled in vain that no other will be better."""
        return self._tried >= _TRIED

    # The choice.

    def rehearsal(self, params: Mapping[str, Tensor]) -> StepProfile:
        """Return the profiled step; a parameter without a gradient was ready at the end of the last backward call.

        Of several calls whose gradients were exchanged each counts as a step: what one computes, and what it sends.
        """
        step = self._step
        assert step is not None and step.turned_s is not None
        whole_s, backward_s = step.ended_s - step.began_s, step.ended_s - step.turned_s
        compute_s = max(whole_s / max(1, step.passes), min(whole_s, backward_s))
        if not 0 < backward_s <= compute_s:
            raise AssertionError(f"a step of {compute_s:g} s with a backward pass of {backward_s:g} s was profiled")
        gradients = {n: step.gradients[n] if n in step.gradients else torch.zeros_like(p) for n, p in params.items()}
        absent = frozenset(n for n, g in gradients.items() if n not in step.ready_s and not bool(g.any()))
        ready_s = {n: step.ready_s.get(n, backward_s) for n in params}
        return StepProfile(compute_s, backward_s, ready_s, gradients, absent)

    def choose(self, params: Mapping[str, Tensor], pump: CommThread) -> ExchangeChoice:
        """Probe the links and choose an exchange. All ranks call it together, between two steps. Raises PeerLost."""
        try:
            return self._chosen(self.rehearsal(params), params, pump)
        except BadInput as error:  # a measurement that is none, which `gossamer train` would tell by its own key
            raise BadInput(error.message, key="exchange") from None

    def _chosen(self, rehearsal: StepProfile, params: Mapping[str, Tensor], pump: CommThread) -> ExchangeChoice:
        is_finite = all(bool(torch.isfinite(one).all()) for one in rehearsal.gradients.values())
        knows = bool(gathered(pump.channel, [float(is_finite)]).min() > 0)
        device = next(iter(params.values())).device
        is_alike = computes_alike(pump.channel, device)
        candidates = CANDIDATES if is_alike else alike_anywhere(CANDIDATES)
        measured = ExchangeProfile.by(rehearsal, params, candidates, pump, knows=knows)
        links = probe(pump.channel, seeks_islands=False)  # one group of ranks
        price = message_price(pump, links, device)
        facts = measured.facts(links, candidates, LARGEST_BUCKET_BYTES, price=price)
        decision = choose(*facts, lossy=self.lossy and knows, candidates=candidates, permission="lossy=True")
        link = links.levels["all"]
        passes = self._step.passes if self._step is not None else 1
        each = f", in each of {passes} backward passes" if passes > 1 else ""
        said = f"{decision.reason}{each}{'' if is_alike else UNLIKE} (links: {link.show()})"
        pauses = slow_start.told(pump.channel, links, rehearsal.compute_s)
        if pump.channel.rank == 0:
            _log.warning("exchange: %s", said)
            if pauses:
                _log.warning("links: %s", pauses)
        return ExchangeChoice(decision.written, decision.buckets, decision.turns)


def _settle() -> None:
    """Wait for a GPU, whose work would else be timed by whoever waits for it next."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
