"""Choice of the gradient exchange for `exchange="auto"` in the user's own loop: profile a dense backward pass, then
choose.

`gossamer train` profiles a step before its first one. The user's loop cannot be run twice, so its second backward pass
is profiled: when each gradient was complete, and its values. After the step that follows, the links are probed and the
same policy chooses from the same measurements. All ranks hold the same numbers, so they choose alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.link_use import LARGEST_BUCKET_BYTES
from gossamer.autotune.message_price import message_price
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.link_probe import probe
from gossamer.plan.exchange import CANDIDATES, choose
from gossamer.run.profile_step import StepProfile
from gossamer.spec.method_config import Exchanges

WATCHED = 2  # number of the profiled backward pass: the first is warm-up
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExchangeChoice:
    """The exchange that all ranks have chosen, the parameters of each bucket, and the bucket of each turn."""

    exchange: Exchanges
    buckets: tuple[tuple[str, ...], ...]
    turns: tuple[int, ...]


@dataclass(slots=True)
class PassProfile:
    """The profile of one backward pass on one rank: gradients, the times they were ready, and step times."""

    lossy: bool
    began_s: float = 0.0  # start of the pass's step
    turned_s: float = 0.0  # start of the backward pass
    ended_s: float = 0.0
    ready_s: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def turn(self) -> None:
        """Record the start of the backward pass."""
        self.turned_s = time.perf_counter()

    def see(self, name: str, gradient: Tensor) -> None:
        """Record a complete gradient of this rank and its time."""
        self.ready_s[name] = time.perf_counter() - self.turned_s
        self.gradients[name] = gradient.detach().clone()

    def end(self) -> None:
        """Record the time at which all gradients of this rank were complete."""
        self.ended_s = time.perf_counter()

    def rehearsal(self, params: Mapping[str, Tensor]) -> StepProfile:
        """Return the pass as a step profile; a parameter without a gradient was ready at the end of the pass."""
        backward_s = self.ended_s - self.turned_s
        gradients = {name: self.gradients.get(name, torch.zeros_like(p)) for name, p in params.items()}
        ready_s = {name: self.ready_s.get(name, backward_s) for name in params}
        return StepProfile(self.ended_s - self.began_s, backward_s, ready_s, gradients)

    def choose(self, params: Mapping[str, Tensor], pump: CommThread) -> ExchangeChoice:
        """Probe the links and choose an exchange. All ranks call it together, between two steps. Raises PeerLost."""
        rehearsal = self.rehearsal(params)
        is_finite = all(bool(torch.isfinite(one).all()) for one in rehearsal.gradients.values())
        knows = bool(gathered(pump.channel, [float(is_finite)]).min() > 0)
        measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=knows)
        links = probe(pump.channel, seeks_islands=False)  # one group of ranks
        device = next(iter(params.values())).device
        price = message_price(pump, links, device)
        facts = measured.facts(links, CANDIDATES, LARGEST_BUCKET_BYTES, price=price)
        decision = choose(*facts, lossy=self.lossy and knows, candidates=CANDIDATES)
        link = links.levels["all"]
        said = f"{decision.reason} (links: {link.show()})"
        if pump.channel.rank == 0:
            _log.warning("exchange: %s", said)
        return ExchangeChoice(decision.written, decision.buckets, decision.turns)
