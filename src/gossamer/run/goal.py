"""The goal of a run, and its progress towards it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of a run: its number of steps, and the intervals of evaluations and checkpoints."""

    steps: int
    evaluate_every: int
    checkpoint_every: int
    seed: int
    seconds: float = 0.0  # for all of it, in this process; 0: as long as it takes


@dataclass(slots=True)
class Progress:
    """The progress that a checkpoint restores beside tensors.

    `step`: steps of the run that are done. `updates`: those that updated parameters; in local-update training those of
    this rank's island.
    """

    step: int = 0
    updates: int = 0
