"""The checkpoint of a run that a command reads: the latest, the best, or that of a step."""

from __future__ import annotations

from pathlib import Path

from gossamer.spec.errors import CheckpointMismatch, bad_input
from gossamer.store.checkpoint import Checkpoint, latest_good, list_checkpoints, open_checkpoint

LATEST, BEST = "latest", "best"


def best_step(directory: Path) -> int | None:
    """Return the step of the best checkpoint in a run's directory of checkpoints; None where none is kept.

    The newest checkpoint whose manifest can be read says so.
    """
    for step in list_checkpoints(directory):
        try:
            watch = open_checkpoint(directory, step).meta.get("watch", {})
        except CheckpointMismatch:
            continue
        return int(watch["best"]["step"]) if "best" in watch else None
    return None


def step_of(directory: Path, written: str | int) -> int | None:
    """Return the step that "latest", "best" or a step stands for; None for the newest good one.

    Raises BadInput for another word, for a best checkpoint where none is kept, and for a step that is not there.
    """
    if written == LATEST:
        return None
    steps = list_checkpoints(directory)
    there = ", ".join(map(str, steps)) or "none"
    if written == BEST:
        found = best_step(directory)
        if found is None:
            raise bad_input(
                wanted="a run that keeps its best checkpoint (train.keep_best)",
                got=f"one that does not, with checkpoints of steps {there}",
                do="name one of these steps, or leave --checkpoint out for the latest",
                key="--checkpoint",
            )
        return found
    if not str(written).isdecimal():
        raise bad_input(
            wanted="latest, best or the step of a checkpoint", got=repr(written), do="write one", key="--checkpoint"
        )
    if int(written) not in steps:
        raise bad_input(
            wanted="the step of a checkpoint that is there",
            got=str(written),
            do=f"name one of those in {directory}: {there}",
            key="--checkpoint",
        )
    return int(written)


def open_chosen(directory: Path, written: str | int) -> Checkpoint:
    """Open the checkpoint that "latest", "best" or a step stands for, and check all of its data.

    Only of the latest one, a damaged one gives way to the one before it. Raises BadInput, CheckpointMismatch.
    """
    step = step_of(directory, written)
    if step is None:
        return latest_good(directory)[0]
    found = open_checkpoint(directory, step)
    found.verify()
    return found
