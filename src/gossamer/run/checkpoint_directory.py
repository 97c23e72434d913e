"""The directory of a run's checkpoints, as the ranks that see it share it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gossamer.store.checkpoint import CheckpointWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDirectory:
    """The directory of a run's checkpoints, and one rank's part in writing them.

    `writer`/`writers` number the ranks that see the same directory. `keep`: the number of checkpoints kept.
    `generation`: the number of times that the ranks were started.
    """

    path: Path
    writer: int = 0
    writers: int = 1
    keep: int = 1
    generation: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank reads, logs and commits for all ranks that see the directory."""
        return self.writer == 0

    def open(self) -> CheckpointWriter:
        """Open the store; its first writer deletes what earlier starts left half-written.

        All ranks open it before they first meet, so that none of them saves before that is done.
        """
        return CheckpointWriter(
            self.path, rank=self.writer, ranks=self.writers, keep=self.keep, token=f"g{self.generation}"
        )
