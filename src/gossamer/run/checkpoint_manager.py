"""Save and resume checkpoints: the trainer decides when, the store writes, the records report the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.comm.channel import Channel, gathered
from gossamer.run.checkpoint import CheckpointContents
from gossamer.run.checkpoint_directory import CheckpointDirectory
from gossamer.run.checkpoint_search import CheckpointSearch
from gossamer.run.goal import Progress
from gossamer.run.watch import Watch
from gossamer.spec import records
from gossamer.spec.errors import BadInput, CheckpointMismatch, PeerLost, RunFailed
from gossamer.store.checkpoint import (
    Checkpoint,
    CheckpointSource,
    CheckpointWriter,
    SaveStatus,
    latest_step,
    list_checkpoints,
    set_aside,
)

FORMAT = 2
_AGAIN_S = 2.0  # before the last save is retried: the user may be freeing disk space
_WORD_S = 1.0  # how often ranks report that they are still writing: no collective waits longer than that for a disk
_SAVED, _FAILED, _WRITING = 0.0, 1.0, 2.0
GatherBytes = Callable[[tuple[float, ...]], Tensor]  # a row of every rank: (ranks, len(row))
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CheckpointManager:
    """The checkpoint manager of one rank: it saves, reports and restores the checkpoints of a run.

    `identity`: entries of a checkpoint's metadata besides those of its contents. `before_save`: called before each of
    them, for files beside them. `contents` and `watch`: set once the trainer is built. The store is open from the
    construction on.
    """

    directory: CheckpointDirectory
    rank: int
    sink: Callable[[records.Record], None]
    identity: dict[str, Any]
    before_save: Callable[[], None] = lambda: None
    progress: Progress = field(default_factory=Progress)
    contents: CheckpointContents = field(init=False, repr=False, compare=False)
    watch: Watch = field(default_factory=Watch)
    _store: CheckpointWriter = field(init=False, repr=False, compare=False)
    _unsaved: str = ""  # why the newest save did not become a checkpoint

    def __post_init__(self) -> None:
        """Open the store."""
        self._store = self.directory.open()

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Copy the state to a staging buffer and return; the store writes it in the background.

        Errors of the write appear as records. If the previous checkpoint is still being written, this one is skipped,
        with a warning; with `last` the call waits instead (in training all ranks call `wait_for_writes` before it).
        """
        self.before_save()
        meta = {"format": FORMAT, **self.contents.meta(), **self.identity}
        pieces = self.contents.pieces(self.directory.writer, self.directory.writers)
        pinned = self.watch.best.pinned if self.watch.best is not None else frozenset()
        patience: dict[str, Any] = {"patience_s": None} if last else {}
        staged = not self.contents.is_in_file
        status = self._store.save(progress.step, pieces, meta, pinned=pinned, staged=staged, **patience)
        if status is SaveStatus.SKIPPED:
            said = "this checkpoint was skipped, as the one before it is still being written"
            self.sink(records.Event(level="warning", message=said, step=progress.step, rank=self.rank))
        self.report()

    def report(self) -> None:
        """Write a record for every checkpoint that was written, or could not be, since the last call."""
        for result in self._store.poll():
            self._unsaved = "" if result.ok else result.error
            self.sink(
                records.Saved(
                    step=result.step,
                    path=str(self.directory.path / f"step-{result.step:08d}"),
                    bytes=result.bytes,
                    copy_s=result.copy_s,
                    write_s=result.write_s,
                    error="" if result.ok else result.error,
                )
            )

    def finish(self, within_s: float | None = None) -> None:
        """Wait for the checkpoint that is being written and report it. `within_s`: after so long give it up."""
        self._store.finish(within_s)
        self.report()

    def wait_for_writes(self, gather: GatherBytes, at: Callable[[int, str], None]) -> None:
        """Wait until no rank is writing a checkpoint any more. All ranks must call it together.

        They tell one another that they still write: one that waited for its own disk alone would be taken for hung by
        the ranks whose disks are faster.
        """
        self._rounds(lambda: _SAVED, gather, at)

    def confirm(self, gather: GatherBytes, at: Callable[[int, str], None]) -> RunFailed | None:
        """Wait until the last step is saved on all disks; return the error to raise if it is not, None if it is.

        A failed save is retried once. All ranks must call it together, and all learn alike whether it failed. Only the
        first writer of a directory knows whether its checkpoint is complete: another writer that stopped waiting
        reports nothing about it.
        """
        lacking = self._lacking(self.progress.step, gather, at)
        if lacking:
            said = f"step {self.progress.step} could not be saved: trying once more in {_AGAIN_S:g} s"
            self._tell("warning", said, step=self.progress.step)
            time.sleep(_AGAIN_S)
            self.save(self.progress, last=True)
            lacking = self._lacking(self.progress.step, gather, at)
        if not lacking:
            self._settle(is_saved=True)
            return None
        if self.rank not in lacking:
            return PeerLost(f"rank {lacking[0]} could not save step {self.progress.step}: see its error message")
        newest = latest_step(self.directory.path)
        left = f"the newest checkpoint is of step {newest}" if newest is not None else "there is no checkpoint"
        return RunFailed(f"{self._missing(self.progress.step)}; {left}")

    def settle_best(self, gather: GatherBytes, at: Callable[[int, str], None]) -> None:
        """Wait until the checkpoint of a new best is written, and agree on whether it is on all disks.

        All ranks must call it, before the next one is saved. Nothing is waited for where no best is pending.
        """
        best = self.watch.best
        if best is None or not best.is_pending:
            return
        step = best.best.step
        lacking = self._lacking(step, gather, at)
        self._settle(is_saved=not lacking)
        if lacking:
            kept = f"that of step {best.best.step} stays" if best.best.is_there else "none is kept so far"
            self._tell("warning", f"the best checkpoint, of step {step}, could not be saved: {kept}", step=step)

    def _settle(self, *, is_saved: bool) -> None:
        best = self.watch.best
        if best is None or not best.is_pending:
            return
        best.settle(is_saved=is_saved)
        self._store.prune(best.pinned)

    def _lacking(self, step: int, gather: GatherBytes, at: Callable[[int, str], None]) -> list[int]:
        """Return the ranks whose disks lack a checkpoint of `step`, once no rank is writing any more."""
        told = self._rounds(lambda: _FAILED if self._missing(step) else _SAVED, gather, at)
        return [rank for rank, one in enumerate(told) if one == _FAILED]

    def _rounds(self, word: Callable[[], float], gather: GatherBytes, at: Callable[[int, str], None]) -> list[float]:
        """Return the `word` of every rank, once no rank is writing any more: until then they say that they are."""
        while True:
            at(self.progress.step, "save")
            is_writing = not self._store.wait(_WORD_S)
            self.report()
            told: list[float] = gather((_WRITING if is_writing else word(),))[:, 0].tolist()
            if _WRITING not in told:
                return told

    def _missing(self, step: int) -> str:
        """Return why a step is not on this disk; "" if it is, and on all writers but the first."""
        if not self.directory.is_leader or step in list_checkpoints(self.directory.path):
            return ""
        return self._unsaved or f"the checkpoint of step {step} is not in {self.directory.path} any more"

    def resume(self, channel: Channel, step: int = -1, *, only: int = -1) -> bool:
        """Restore the trainer from the newest checkpoint that is good on all hosts; return False if there is none.

        All ranks must call it. `step`: the newest step to accept; -1: any. `only`: the step to restore, whatever is
        newer; -1: the newest. Damaged checkpoints that are passed over are quarantined, and good ones of later steps,
        which another host may lack, are set aside. Raises BadInput for a checkpoint made with other settings,
        CheckpointMismatch if none is good, or not that of `only`.
        """
        wanted = only if only >= 0 else step
        until = wanted if wanted >= 0 else None
        found = CheckpointSearch(channel, self.directory.path, self.directory.is_leader).run(until)
        if found is None:
            return False
        checkpoint, problems = found
        if only >= 0 and checkpoint.step != only:
            raise CheckpointMismatch(
                f"the checkpoint of step {only} in {self.directory.path} is damaged, or is not there on every host: "
                "resume from another one with --checkpoint STEP, or from the latest"
            )
        self._check(checkpoint)
        for bad, problem in problems.items():
            self._tell("warning", f"{problem}; fell back to the checkpoint before it; {self._set_aside(bad)}")
        told = self.contents.restore(CheckpointSource(checkpoint))
        if told:
            self._tell("info", told, step=checkpoint.step)
        self._check_best(channel)
        self._leave_behind(checkpoint.step, is_asked=only >= 0, besides=problems)
        return True

    def _check_best(self, channel: Channel) -> None:
        """Forget the best checkpoint where a disk does not hold it, e.g. as the newest ones were damaged."""
        best = self.watch.best
        if best is None or not best.best.is_there:
            return
        step = best.best.step
        if 0.0 in gathered(channel, [float(not self._missing(step))])[:, 0].tolist():
            best.restore({})
            said = f"the best checkpoint so far, of step {step}, is not there on every host: it is looked for anew"
            self._tell("warning", said)

    def _leave_behind(self, step: int, *, is_asked: bool, besides: Collection[int]) -> None:
        """Set the checkpoints after `step` aside: the run goes on from there, and they are of another history.

        `besides`: steps of damaged ones, which are quarantined already, or could not be.
        """
        if not self.directory.is_leader:
            return
        later = [one for one in list_checkpoints(self.directory.path) if one > step and one not in besides]
        names = [set_aside(self.directory.path, one).name for one in later]
        if names:
            why = "as asked" if is_asked else "the newest that is good on every host"
            said = f"goes on from step {step}, {why}; the later checkpoints are kept as {', '.join(names)}"
            said += ", which nothing reads: remove them when you do not need them"
            self._tell("info" if is_asked else "warning", said, step=step)

    def _tell(self, level: str, message: str, *, step: int = -1) -> None:
        self.sink(records.Event(level=level, message=message, step=step, rank=self.rank))
        if self.rank and level == "warning":  # another host's directory: rank 0 alone writes records
            _log.warning("%s", message)

    def _set_aside(self, step: int) -> str:
        try:
            return f"the damaged one is now {set_aside(self.directory.path, step).name}"
        except OSError as error:
            return f"the damaged one could not be renamed ({error.strerror})"

    def _check(self, checkpoint: Checkpoint) -> None:
        if checkpoint.meta.get("format") != FORMAT:
            raise BadInput(
                f"{checkpoint.folder}: wanted a checkpoint of format {FORMAT}, got {checkpoint.meta.get('format')}. "
                f"Resume with gossamer {checkpoint.meta.get('gossamer')}, which wrote it, or export the model "
                "with that version and start a new run"
            )
        for name in ("seed", "batch", "data", "sequence", "pack"):
            now = self.identity.get(name)
            saved = checkpoint.meta.get(name, now)
            if saved != now:
                raise BadInput(
                    f"{checkpoint.folder}: the checkpoint was made with {name} {saved!r}, the run has {now!r}: the "
                    f"order of the samples would change. Resume with {name} {saved!r}, or start a new run"
                )
        try:
            self.contents.check(CheckpointSource(checkpoint))
        except CheckpointMismatch as error:  # every byte is as written: it is the user's model that is another
            raise BadInput(f"{error}, or start a new run") from None
