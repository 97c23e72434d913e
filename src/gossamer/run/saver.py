"""Saving and resuming: the trainer says when, the store does the writing, the records tell what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.run.checkpoint import Contents
from gossamer.run.trainer import Progress
from gossamer.spec import records
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    SaveStatus,
    latest_good,
    list_checkpoints,
    open_checkpoint,
)

FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Saver:
    """One rank's side of the checkpoints of a run. `writer`/`writers` number the ranks that see this directory."""

    directory: Path
    rank: int
    ranks: int
    writer: int
    writers: int
    keep: int
    generation: int
    sink: Callable[[records.Record], None]
    residuals: str = "merge"  # of exchanges, when the number of ranks is another: merge | drop
    identity: dict[str, Any]  # what the meta of a checkpoint says beside the progress
    progress: Progress = field(default_factory=Progress)
    contents: Contents | None = None
    _store: CheckpointWriter | None = None

    def open(self) -> None:
        """Before any rank can save: the leader sweeps what an earlier run left half-written."""
        self._store = CheckpointWriter(
            self.directory, rank=self.writer, ranks=self.writers, keep=self.keep, token=f"g{self.generation}"
        )

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Copy the state aside and go on; the writing happens behind, its errors surface as records.

        While the one before is still being written, this one is skipped, with a notice; `last` waits instead.
        """
        assert self.contents is not None and self._store is not None
        meta = {
            "format": FORMAT,
            "step": progress.step,
            "rejected": progress.rejected,
            "ranks": self.ranks,
            **self.identity,
        }
        pieces = self.contents.pieces(self.writer, self.writers)
        status = self._store.save(progress.step, pieces, meta, **({"patience_s": None} if last else {}))
        if status is SaveStatus.SKIPPED:
            said = "the checkpoint before this one is still being written: this one was skipped"
            self.sink(records.Event(level="warning", message=said, step=progress.step, rank=self.rank))
        self.report()

    def report(self) -> None:
        """Records of what has been written, or could not be, since the last call."""
        if self._store is None:
            return
        for result in self._store.poll():
            self.sink(
                records.Saved(
                    step=result.step,
                    path=str(self.directory / f"step-{result.step:08d}"),
                    bytes=result.bytes,
                    copy_s=result.copy_s,
                    write_s=result.write_s,
                    error="" if result.ok else result.error,
                )
            )

    def finish(self) -> None:
        """Wait for what is being written; report it."""
        if self._store is not None:
            self._store.finish()
            self.report()
            self._store = None

    def resume(self, step: int = -1) -> bool:
        """Fill the trainer from the newest good checkpoint, or from `step` where the hosts agreed on one.

        False when there is none at all. Raises CheckpointMismatch.
        """
        assert self.contents is not None
        if not list_checkpoints(self.directory):
            return False
        checkpoint, problems = self._agreed(step) if step >= 0 else latest_good(self.directory)
        for problem in problems:
            self.sink(records.Event(level="warning", message=f"{problem}; fell back to the one before", rank=self.rank))
        self._check(checkpoint)
        told = self.contents.fill(checkpoint, residuals=self.residuals)
        if told:
            self.sink(records.Event(level="info", message=told, step=int(checkpoint.meta["step"]), rank=self.rank))
        self.progress.step = int(checkpoint.meta["step"])
        self.progress.rejected = int(checkpoint.meta["rejected"])
        return True

    def _agreed(self, step: int) -> tuple[Checkpoint, tuple[str, ...]]:
        checkpoint = open_checkpoint(self.directory, step)
        checkpoint.verify()
        return checkpoint, ()

    def _check(self, checkpoint: Checkpoint) -> None:
        for name in ("seed", "batch", "data"):
            saved, now = checkpoint.meta.get(name), self.identity.get(name)
            if saved != now:
                raise CheckpointMismatch(
                    f"{self.directory}: the checkpoint was made with {name} {saved!r}, the run has {now!r}: the order "
                    f"of the samples would change. Resume with {name} {saved!r}, or start a new run"
                )
