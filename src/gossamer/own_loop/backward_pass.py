"""One backward pass in progress, and the settings of all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.comm.channel import Pending
from gossamer.comm.comm_thread import CommStep
from gossamer.own_loop.blocking_exchange import BlockingExchange
from gossamer.own_loop.gradient_hooks import PassEnding
from gossamer.own_loop.loss_denominator import LossDenominator, ReadDenominator
from gossamer.own_loop.status_rows import Deferred, StatusRow, StatusRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """The settings of a loop's gradient averaging. `loss`: the rule by which a loss's denominator is known."""

    accumulate: int = 1
    loss: LossDenominator = field(default_factory=ReadDenominator)
    seed: int = 0
    lossy: bool = False  # whether exchange="auto" may choose a lossy one
    scale: Callable[[], float] | None = None  # the GradScaler's current loss scale
    bucket_bytes: int = 25 << 20


@dataclass(slots=True)
class BackwardPass:
    """A backward pass in progress. The engine keeps each callback of `endings` alive until it calls or drops it."""

    row: StatusRow
    weighing: Pending
    exchanging: CommStep | BlockingExchange | None  # None: a pass of a group before its last
    is_grouped: bool
    endings: dict[int, weakref.ref[PassEnding]]
    deferred: Deferred | None = None  # of the previous step
    touched: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    rows: StatusRows | None = None
