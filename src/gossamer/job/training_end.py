"""The training of a rank up to its end: done, interrupted or failed, with the last checkpoint and the end record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gossamer.job.rank_inputs import RankJob
from gossamer.process.stack_position import place_of
from gossamer.run.checkpoint_manager import CheckpointManager
from gossamer.run.resources import peak_bytes
from gossamer.run.trainer import EarlyEnd, Trainer
from gossamer.spec import records
from gossamer.spec.errors import BadInput, Interrupted, PeerLost, RunFailed

_LOST_S = 60.0  # for the save in flight, once a rank is lost


def train_to_end(
    job: RankJob, trainer: Trainer, saver: CheckpointManager, sink: Callable[[records.Record], None]
) -> dict[str, Any]:
    """Train, write the end record, and return the outcome, step, seconds and peak memory."""
    began = time.perf_counter()  # at the start record, so that all reports agree on the run's length

    def end(outcome: str, message: str = "", reason: str = "", within_s: float | None = None) -> dict[str, Any]:
        saver.finish(within_s)
        step, seconds = trainer.progress.step, time.perf_counter() - began
        sink(records.End(step=step, outcome=outcome, message=message, seconds=seconds, reason=reason))
        if outcome != "failed" and job.callbacks.sealed is not None:
            job.callbacks.sealed(outcome)
        return {"outcome": outcome, "step": step, "seconds": seconds, "peak_bytes": peak_bytes()}

    try:
        early = _run(job, trainer, saver)
    except Interrupted as error:
        end("interrupted", str(error))
        raise
    except BaseException as error:
        if kept := trainer.states.keep():
            sink(records.Event(level="warning", message=kept, step=trainer.progress.step))
        # A checkpoint amid its write is completed if all ranks still can; a lost one's part does not come.
        end("failed", _why(error), within_s=_LOST_S if isinstance(error, PeerLost) else None)
        raise
    return end("done") if early is None else end("done", early.message, early.reason)


def _why(error: BaseException) -> str:
    """Return the message of the run's last record. Supervisors know better than the victim why a peer was lost."""
    if isinstance(error, PeerLost):
        return "another rank was lost"
    place = "" if isinstance(error, (BadInput, RunFailed)) else place_of(error)
    return f"{type(error).__name__}: {error}" + (f", at {place}" if place else "")


def _run(job: RankJob, trainer: Trainer, saver: CheckpointManager) -> EarlyEnd | None:
    """Train; on both exits confirm the last checkpoint, and restore the caller's full module.

    Returns why the run is done before its last step, None where it is not.
    """
    interrupted: Interrupted | None = None
    early: EarlyEnd | None = None
    try:
        early = trainer.run()
    except Interrupted as error:
        interrupted = error
    unsaved = saver.confirm(trainer.replica.gather, job.at)
    if job.is_kept:
        trainer.evaluator.point.stay()
        trainer.states.leave()
    if unsaved is not None:
        how = "stopped as asked after" if interrupted is not None else "trained to"
        raise type(unsaved)(f"{how} step {trainer.progress.step}, but {unsaved}")
    if interrupted is not None:
        raise interrupted
    return early
