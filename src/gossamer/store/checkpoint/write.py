"""Writing checkpoints: copy into staging buffers, return to training, and write in one background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from gossamer.spec.errors import bad_input
from gossamer.store.checkpoint.commit import prepare, prune, sweep
from gossamer.store.checkpoint.manifest import check_json
from gossamer.store.checkpoint.save_attempt import SaveAttempt, SaveGroup
from gossamer.store.checkpoint.staging import Staging
from gossamer.store.slices import NamedSlice

_GIVEN_UP_S = 600.0  # for a rank's own part, which is written to its end


class SaveStatus(Enum):
    """The answer to a request to save a checkpoint."""

    STARTED = "started"
    SKIPPED = "skipped: the previous save is still being written"


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a checkpoint save.

    `copy_s`: seconds that training waited; `write_s`: seconds of the thread until the commit.
    """

    step: int
    ok: bool
    error: str
    bytes: int
    copy_s: float
    write_s: float


def _never() -> bool:
    return False


class CheckpointWriter:
    """The checkpoint writer of rank `rank` of `ranks`, which share a file system and save the same steps. Rank 0 leads.

    Staging costs a host copy of everything saved. The disk holds `keep` + 1 checkpoints at most.
    """

    def __init__(
        self,
        directory: Path | str,
        rank: int,
        ranks: int,
        keep: int = 2,
        *,
        token: str = "",
        deadline_s: float = 600.0,
        abort: Callable[[], bool] = _never,
    ) -> None:
        """Make the checkpoint directory; the leader also sweeps it, so it must be there before any rank saves.

            token:      of this generation of the ranks; equal on all of them. It keeps a rank of an earlier one that
                        still writes apart; what earlier starts left, also those of the same token, is swept.
            deadline_s: a rank that waits longer than this gives up the save.
            abort:      called often from the thread; the rank gives up the save when it returns true.

        Raises BadInput where the directory cannot be made, and for a wrong `keep` or `rank`.
        """
        if keep < 1:
            raise bad_input(wanted="keep >= 1", got=str(keep), do="keep at least the newest checkpoint")
        if not 0 <= rank < ranks:
            raise bad_input(wanted=f"a rank below {ranks}", got=str(rank), do="number the ranks from 0")
        self._given_up = threading.Event()

        def gives_up() -> bool:
            return self._given_up.is_set() or abort()

        self._crew = SaveGroup(Path(directory), rank, ranks, keep, token, deadline_s, gives_up)
        self._staging = Staging()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._results: list[SaveResult] = []
        self._refused: list[int] = []
        self._last_step: int | None = None
        prepare(self._crew.directory)
        if self._crew.is_leader:
            sweep(self._crew.directory)

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        pieces: Sequence[NamedSlice],
        meta: Mapping[str, Any],
        *,
        patience_s: float | None = 1.0,
        pinned: frozenset[int] = frozenset(),
        staged: bool = True,
    ) -> SaveStatus:
        """Copy `pieces` into staging and return; `poll` returns the result later. The tensors may be changed at once.

        While an earlier save is being written this waits up to `patience_s` seconds (None: until it is done), then
        skips this save and notifies the other ranks. Beside the newest checkpoints those of the `pinned` steps stay.
        Not `staged`: write the tensors as they are, and return when they are written, without a copy in memory.
        Raises BadInput for a `meta` that is not plain JSON.
        """
        check_json(dict(meta))
        self._last_step = step
        if not self._join(patience_s if staged else None):
            self._skip(step)
            return SaveStatus.SKIPPED
        began_s = time.perf_counter()
        if not staged:
            self._write(SaveAttempt(self._crew, step, pinned), list(pieces), dict(meta), 0.0)
            return SaveStatus.STARTED
        copied = self._staging.copy(pieces)
        copy_s = time.perf_counter() - began_s
        name = f"gossamer-checkpoint-{step}"
        self._thread = threading.Thread(
            target=self._write,
            args=(SaveAttempt(self._crew, step, pinned), copied, dict(meta), copy_s),
            name=name,
            daemon=True,
        )
        self._thread.start()
        return SaveStatus.STARTED

    def prune(self, pinned: frozenset[int]) -> None:
        """Remove all but the newest checkpoints and those of the `pinned` steps, once nothing is being written."""
        if self._crew.is_leader and self._last_step is not None and not self.is_busy:
            prune(self._crew.directory, self._last_step, self._crew.keep, pinned)

    def wait(self, patience_s: float) -> bool:
        """Wait for the save in flight; return False where it is still being written after `patience_s` seconds."""
        return self._join(patience_s)

    def poll(self) -> list[SaveResult]:
        """Return the results of the saves that ended since the last call."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def finish(self, within_s: float | None = None) -> None:
        """Wait for the save in flight and its thread. `poll` then returns its result.

        `within_s`: after so long give it up, as the ranks that it waits for may be lost.
        """
        if not self._join(within_s):
            self._given_up.set()
            if not self._join(_GIVEN_UP_S):  # the disk does not answer
                return
        if self._crew.is_leader and self._last_step is not None:
            sweep(self._crew.directory, below=self._last_step + 1)

    def _join(self, patience_s: float | None) -> bool:
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _skip(self, step: int) -> None:
        """Queue the notice to the other ranks; the busy thread writes it, as the target may be slow."""
        with self._lock:
            self._refused.append(step)
        if not self.is_busy:
            self._leave_notes()

    def _write(self, attempt: SaveAttempt, pieces: list[NamedSlice], meta: dict[str, Any], copy_s: float) -> None:
        began_s = time.perf_counter()
        error_text = ""
        try:
            attempt.run(pieces, meta)
        except Exception as error:  # no caller above this thread: the result carries any error
            error_text = attempt.explain(error, pieces)
        size = sum(tensor.nbytes for _, tensor in pieces)
        result = SaveResult(attempt.step, not error_text, error_text, size, copy_s, time.perf_counter() - began_s)
        with self._lock:
            self._results.append(result)
        self._leave_notes()

    def _leave_notes(self) -> None:
        with self._lock:
            refused, self._refused = self._refused, []
        for step in refused:
            SaveAttempt(self._crew, step).refuse(SaveStatus.SKIPPED.value)
