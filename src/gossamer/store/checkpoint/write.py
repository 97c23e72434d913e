"""Writing: copy, return, and let one background thread do the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from gossamer.spec.errors import bad_input
from gossamer.store.checkpoint.commit import prepare, sweep
from gossamer.store.checkpoint.manifest import check_json
from gossamer.store.checkpoint.save_attempt import SaveAttempt, SaveGroup
from gossamer.store.checkpoint.staging import Staging
from gossamer.store.slices import NamedSlice


class SaveStatus(Enum):
    """What became of a request to save."""

    STARTED = "started"
    SKIPPED = "skipped: the previous save is still being written"


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended. `copy_s` is what training waited for, `write_s` what the thread took until the commit."""

    step: int
    ok: bool
    error: str
    bytes: int
    copy_s: float
    write_s: float


def _never() -> bool:
    return False


class CheckpointWriter:
    """Rank `rank` of `ranks` that share a file system; all of them save the same steps. Rank 0 leads.

    Staging costs a host copy of everything saved. On disk there is room for `keep` + 1 checkpoints at most.
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
        """`token` tells this start of the run (and each generation of its ranks) from earlier ones and is equal on
        all ranks: what another left is never mistaken for a part of this one. A rank that waits longer than
        `deadline_s`, or is told so by `abort` (asked often, from the thread), gives up that save.
        Raises BadInput where the directory cannot be made.
        """
        if keep < 1:
            raise bad_input(wanted="keep >= 1", got=str(keep), do="keep at least the newest checkpoint")
        if not 0 <= rank < ranks:
            raise bad_input(wanted=f"a rank below {ranks}", got=str(rank), do="number the ranks from 0")
        self._crew = SaveGroup(Path(directory), rank, ranks, keep, token, deadline_s, abort)
        self._staging = Staging()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._results: list[SaveResult] = []
        self._refused: list[int] = []
        self._last_step: int | None = None
        prepare(self._crew.directory)
        if self._crew.is_leader:
            sweep(self._crew.directory, token)

    @property
    def is_busy(self) -> bool:
        """A save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, step: int, pieces: Sequence[NamedSlice], meta: Mapping[str, Any], *, patience_s: float | None = 1.0
    ) -> SaveStatus:
        """Copy `pieces` and return; `poll` tells how it ended. The tensors may be changed at once.

        While an earlier save is being written this waits up to `patience_s` (None: until it is done), then skips this
        one and lets the other ranks know. Raises BadInput for a `meta` that is not plain JSON.
        """
        check_json(dict(meta))
        self._last_step = step
        if not self._join(patience_s):
            self._skip(step)
            return SaveStatus.SKIPPED
        began_s = time.perf_counter()
        copied = self._staging.copy(pieces)
        copy_s = time.perf_counter() - began_s
        name = f"gossamer-checkpoint-{step}"
        self._thread = threading.Thread(
            target=self._write, args=(step, copied, dict(meta), copy_s), name=name, daemon=True
        )
        self._thread.start()
        return SaveStatus.STARTED

    def wait(self, patience_s: float) -> bool:
        """Wait for the save in flight; False where it is still being written after `patience_s`."""
        return self._join(patience_s)

    def poll(self) -> list[SaveResult]:
        """How the saves ended that did so since the last call."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def finish(self) -> None:
        """Wait for the save in flight; no thread is left. `poll` then tells how it ended."""
        self._join(None)
        if self._crew.is_leader and self._last_step is not None:
            sweep(self._crew.directory, self._crew.token, below=self._last_step + 1)

    def _join(self, patience_s: float | None) -> bool:
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _skip(self, step: int) -> None:
        """The note for the others goes to the slow target, so the thread leaves it there when it is done."""
        with self._lock:
            self._refused.append(step)
        if not self.is_busy:
            self._leave_notes()

    def _write(self, step: int, pieces: list[NamedSlice], meta: dict[str, Any], copy_s: float) -> None:
        began_s = time.perf_counter()
        attempt, error_text = SaveAttempt(self._crew, step), ""
        try:
            attempt.run(pieces, meta)
        except Exception as error:  # nobody is above this thread: whatever it was, the result carries it
            error_text = attempt.explain(error, pieces)
        size = sum(tensor.nbytes for _, tensor in pieces)
        result = SaveResult(step, not error_text, error_text, size, copy_s, time.perf_counter() - began_s)
        with self._lock:
            self._results.append(result)
        self._leave_notes()

    def _leave_notes(self) -> None:
        with self._lock:
            refused, self._refused = self._refused, []
        for step in refused:
            SaveAttempt(self._crew, step).refuse(SaveStatus.SKIPPED.value)
