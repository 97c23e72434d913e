"""The services that a trainer calls: the record sink, position reports, stop requests, the checkpoint manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gossamer.comm.comm_thread import CommThread
from gossamer.exchange import Exchange
from gossamer.run.checkpoint_manager import CheckpointManager
from gossamer.spec import records

Sink = Callable[[records.Record], None]
INTERRUPT, FINISH = 1, 2  # requests to stop; of several ranks' requests the largest holds


@dataclass(frozen=True, slots=True)
class Replan:
    """A change between two steps: the exchange of every parameter's gradient, the buckets, and the order of turns."""

    exchange: Mapping[str, Exchange]
    bucket_bytes: int
    buckets: tuple[tuple[str, ...], ...] = ()
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerServices:
    """The callbacks and services of a trainer: record sink, position reports, stop requests, checkpoint manager.

    `asked_to_stop` returns 0, INTERRUPT (save, and end as interrupted) or FINISH (save, and end as done).
    """

    sink: Sink
    at: Callable[[int, str], None]
    asked_to_stop: Callable[[], int]
    saver: CheckpointManager
    beside: CommThread | None = None  # for rounds of the outer loop and all-gathers of shards, beside the steps
    replan: Callable[[int, float, float], Replan | None] = lambda step, compute_s, exposed_s: None
