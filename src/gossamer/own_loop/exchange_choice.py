"""`exchange="auto"` in somebody's own loop: the first backward passes go dense and are watched, then all ranks choose.

A run of ours rehearses a step before its first one. A loop of somebody else cannot be run twice, so its second backward
pass is the rehearsal: when which gradient was complete, and what it was. After the step that follows, links are probed
and the same policy chooses from the same facts; all ranks hold the same numbers, so they choose alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.exchange_selection import bucket_bytes_for
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.link_probe import probe
from gossamer.plan.exchange import CANDIDATES, choose
from gossamer.run.profile_step import StepProfile
from gossamer.spec.method_config import Exchanges
from gossamer.spec.units import show_rate

WATCHED = 2  # the backward pass that is watched: the first one warms up
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExchangeChoice:
    """What the ranks have settled on."""

    exchange: Exchanges
    bucket_bytes: int


@dataclass(slots=True)
class PassWatch:
    """One rank's look at one backward pass of a loop."""

    lossy: bool
    began_s: float = 0.0  # of the step that the pass belongs to
    turned_s: float = 0.0  # when its backward began
    ended_s: float = 0.0
    ready_s: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def turn(self) -> None:
        """The backward pass begins."""
        self.turned_s = time.perf_counter()

    def see(self, name: str, gradient: Tensor) -> None:
        """A gradient of this rank's own is complete."""
        self.ready_s[name] = time.perf_counter() - self.turned_s
        self.gradients[name] = gradient.detach().clone()

    def end(self) -> None:
        """All gradients of this rank are there."""
        self.ended_s = time.perf_counter()

    def rehearsal(self, params: Mapping[str, Tensor]) -> StepProfile:
        """The pass, as if it had been one of ours; what had no gradient was ready at its end."""
        backward_s = self.ended_s - self.turned_s
        gradients = {name: self.gradients.get(name, torch.zeros_like(p)) for name, p in params.items()}
        ready_s = {name: self.ready_s.get(name, backward_s) for name in params}
        return StepProfile(self.ended_s - self.began_s, backward_s, ready_s, gradients)

    def choose(self, params: Mapping[str, Tensor], pump: CommThread, largest_bytes: int) -> ExchangeChoice:
        """Probe the links and choose. All ranks call it together, between two steps. Raises PeerLost."""
        rehearsal = self.rehearsal(params)
        is_finite = all(bool(torch.isfinite(one).all()) for one in rehearsal.gradients.values())
        knows = bool(gathered(pump.channel, [float(is_finite)]).min() > 0)
        measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=knows)
        links = probe(pump.channel)
        links = links.model_copy(update={"levels": {"all": links.levels["all"]}})  # ranks are one level here
        cut = bucket_bytes_for(links, largest_bytes)
        decision = choose(measured.facts(links, CANDIDATES, cut), lossy=self.lossy and knows, candidates=CANDIDATES)
        link = links.levels["all"]
        said = f"{decision.reason} (links: {show_rate(link.bytes_per_s)}, {1e3 * link.latency_s:.1f} ms)"
        if pump.channel.rank == 0:
            _log.warning("exchange: %s", said)
        return ExchangeChoice(decision.written, largest_bytes if decision.written == CANDIDATES[0].written else cut)
