"""What pool workers run for the tests of best checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gossamer.store.checkpoint import list_checkpoints, save_attempt
from gossamer.store.checkpoint.shard import write_shard
from pool import Seat
from run import jobs
from run.jobs import Tokens, train


def train_with_failing_save(seat: Seat, *, folder: str, fails: int, **given: Any) -> dict[str, Any]:
    """As `train`, where the last rank cannot write the checkpoint of step `fails`.

    `during` in the folder: the steps on the disk as each save began.
    """
    there: list[tuple[int, ...]] = []

    def failing(path: Path, *args: Any) -> Any:
        if seat.rank == 0:
            there.append(list_checkpoints(path.parents[1]))
        if f"step-{fails:08d}" in str(path) and seat.rank == seat.ranks - 1:
            raise OSError(28, "No space left on device")
        return write_shard(path, *args)

    with patch.object(save_attempt, "write_shard", failing):
        found = train(seat, folder=folder, **given)
    if seat.rank == 0:
        (Path(folder) / "during").write_text(json.dumps(there))
    return found


def train_on_sets(seat: Seat, *, sets: dict[str, int], logits: int = 0, **given: Any) -> dict[str, Any]:
    """As `train` with 4 steps, evaluated on the first items of the data by the names of `sets`.

    `logits`: those of the trained model on so many items, if above 0.
    """
    with patch.object(jobs, "VALIDATION", {name: Tokens(count) for name, count in sets.items()}):
        return train(seat, **{"steps": 4, "logits": logits, **given})
