"""The phases of a run whose ranks torchrun, srun or mpirun started: every rank goes through all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from gossamer.api.phase_runner import PhaseRunner, Spread, prepared
from gossamer.comm.patience import PatientStore
from gossamer.job.worker import joined, run_rank, time_limit_s
from gossamer.launch.agreement import Agreement, appears
from gossamer.launch.agreement_ranks import RankStore
from gossamer.launch.worker import Ready
from gossamer.settings.phases import Phase
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, Interrupted, bad_input
from gossamer.view.failed_start import rollback_failed_start
from gossamer.view.open_display import open_display
from gossamer.view.run_lock import held

_SAVE_S = 600.0  # the longest that a rank saves
_LEAVE_S = 5.0  # for the store to take this rank's last word


@dataclass(slots=True)
class RanksRunner(PhaseRunner):
    """One rank. `store`: of the launcher, or of rank 0; each phase has a prefix of its own in it.

    `answers_s`: how long another rank may take to answer the first; it may still save what a phase has trained.
    """

    ready: Ready
    store: PatientStore
    phases: int
    answers_s: float
    _line: RankStore = field(init=False, repr=False)
    _refusal: BaseException | None = field(default=None, repr=False)  # why this rank does not go on

    def __post_init__(self) -> None:
        place = self.ready.place
        store = self.store.under(f"phases/{place.start.generation}")
        # The others have only to answer; what the first does meanwhile may take long.
        timeout_s = self.answers_s if self.is_first else math.inf
        self._line = RankStore(store, place.rank, place.ranks, timeout_s=timeout_s)

    @staticmethod
    @contextmanager
    def joined(ready: Ready, config: RunConfig) -> Iterator[RanksRunner]:
        """Connect with the other ranks inside the `with` block. Raises PeerLost, BadInput."""
        place = ready.place
        limit_s = time_limit_s(place, config)
        store = PatientStore(joined(place, limit_s), limit_s)
        runner = RanksRunner(ready, store, len(config.train.phases), limit_s + _SAVE_S)
        try:
            yield runner
        finally:
            store.hurry(_LEAVE_S)
            runner._line.leave()

    @property
    def is_first(self) -> bool:
        return self.ready.place.rank == 0

    def spread(self, config: RunConfig) -> Spread:
        return Spread(ranks=self.ready.place.ranks, local_ranks=self.ready.place.local_ranks)

    def agreed(self, make: Callable[[], str]) -> str:
        return Agreement(self._line).agreed(make, self._why_not)

    def _why_not(self) -> BaseException | None:
        return Interrupted("stopped between phases") if self.ready.stop.is_set else self._refusal

    def given(self, folder: Path) -> None:
        """Ranks of a launcher have one run directory, which all their hosts see."""
        self.agreed(lambda: "")
        self._refusal = None if appears(folder.is_dir) else self._unseen(folder)
        self.agreed(lambda: "")

    @property
    def holds(self) -> bool:
        return self.is_first

    def train(self, phase: Phase, *, resume: bool) -> bool:
        directory, config = phase.directory, phase.config
        with ExitStack() as stack:
            if self.holds:
                stack.enter_context(held(directory.path))
                stack.enter_context(rollback_failed_start(directory))
            self.agreed(lambda: prepared(phase))
            display = open_display(config.run.display if self.is_first else "quiet", title=directory.name)
            stack.callback(display.close)
            run_rank(
                self.ready,
                directory,
                config,
                resume=resume,
                show=display.show,
                store=dist.PrefixStore(f"phase/{self.ready.place.start.generation}/{phase.number}", self.store.whole),
                is_last=phase.number == self.phases,
            )
        return self.ready.stop.is_set

    def _unseen(self, folder: Path) -> BadInput:
        return bad_input(
            wanted=f"the start folder {folder} on host {self.ready.place.hostname}",
            got="none, as rank 0 wrote it on another file system",
            do="set run.directory to a folder that all hosts see, or start with `gossamer train --hosts`, which copies "
            "what it prepares",
            key="run.directory",
        )
