"""The inputs of one rank's job: what it trains, where, and whom it reports to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from gossamer.comm.comm_thread import Observer
from gossamer.partition.rank_model import Planned
from gossamer.recipe import PlanMethods
from gossamer.run.parts import Parts
from gossamer.spec import records
from gossamer.view.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The rank, the world size, and the store for the rendezvous.

    `writer`/`writers`: this rank's index among the ranks that see the same run directory, and their number. `host`: the
    number of this rank's host among `hosts`.
    """

    rank: int = 0
    ranks: int = 1
    writer: int = 0
    writers: int = 1
    hosts: int = 1
    host: int = 0
    store: dist.Store
    interface: str = ""
    generation: int = 0
    timeout_s: float = 120.0  # how long a message may take
    is_supervised: bool = True  # another process finds out which rank is lost


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCallbacks:
    """The callbacks of a rank's job: into supervision, the display and the run's files."""

    moves: Callable[[], None] = _nothing  # called for every message that starts or completes
    observe: Observer | None = None  # called for every message that starts
    sealed: Callable[[str], None] | None = None  # called with "done" or "interrupted", once all is written
    show: Callable[[records.Record], None] | None = None  # displays a record
    keep: Callable[[], None] | None = None  # writes the files beside the checkpoints, once all ranks agree


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDescription:
    """The training data of a run in words and figures: for records, checkpoints and the user."""

    fingerprint: str
    text: str  # for the user
    validation: str = ""  # fingerprints of the validation sets
    remark: str = ""  # a warning, for the user
    vocabulary: int = 0  # ids of the tokenizer, where the data is text


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """The inputs of one rank's job: model, data, rendezvous, directory, callbacks. All ranks hold the same
    `parts.plan`.
    """

    parts: Parts
    where: RankContext
    directory: RunDirectory
    described: str  # the model, for people
    data: DataDescription
    resume: bool
    resume_step: int = -1  # the one all hosts hold; -1: the newest good one here
    checkpoint: int = -1  # the step that the user asks for, whatever is newer; -1: the newest
    at: Callable[[int, str], None]
    asked_to_stop: Callable[[], int]  # see `TrainerServices`
    callbacks: JobCallbacks = field(default_factory=JobCallbacks)
    planned: Planned | None = None  # builds this rank's part, if that is not built yet or is to be proved
    is_kept: bool = False  # whether to restore the caller's full module from sharded parameters at the end

    @property
    def automatic(self) -> bool:
        """Return whether Gossamer chooses the gradient exchange, before the run and during it."""
        asked = PlanMethods.asked(self.parts.config.plan)
        return asked.chooses_exchange and self.parts.cut is None and not asked.sharding.is_tiered
