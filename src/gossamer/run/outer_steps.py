"""The outer loop as a trainer calls it after every step, and what the islands report to each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.optimizer import Optimizer
from gossamer.run.goal import Goal
from gossamer.run.step_algorithm import At
from gossamer.run.trainer_services import Sink
from gossamer.sharding import ShardedOptimizer
from gossamer.spec import records
from gossamer.sync import GradientReducer, LocalStep, OuterLoop, ReplicaStatus, StatusChannel, StepAgreement, Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSteps:
    """The outer loop of one rank, with the status channel between islands. Synchronous training has neither."""

    sync: Sync
    apart: OuterLoop
    word: StatusChannel | None  # between islands in local-update training
    replica: GradientReducer
    states: ShardedOptimizer
    rule: Optimizer
    sink: Sink
    at: At  # reports this rank's position to the supervisor: (step, phase)
    asked_to_stop: Callable[[], int]

    def note(self, agreement: StepAgreement, level: str, *, committed: bool) -> None:
        """Keep the loss of a step that one island made by itself, for the next report to the others."""
        if self.word is not None and level != "all":
            self.word.note(agreement.loss, agreement.weight, committed=committed)

    def after(self, goal: Goal, done: int, lr: float, samples: float, *, made: bool = True) -> None:
        """Apply and start rounds of the outer loop that are due after `done` steps."""
        self.at(done, "meet")
        moved = LocalStep(done, lr * self.rule.lr, samples, goal.seed, last=done == goal.steps, made=made)
        for landed in self.apart.after(moved):
            self.states.meet(landed.moved, rates=landed.rates)
            self.states.learn(landed.squares)
        self.replica.timing.exposed_s += self.apart.exposed_s  # including the wait for a checkpoint since the last step
        self.apart.exposed_s = 0.0

    def stops(self, goal: Goal, done: int, ask: int = 0) -> int:
        """Return the request to stop that all ranks follow after `done` steps, 0 for none (see `TrainerServices`).

        If all ranks voted on the step, one vote `ask` is enough; else they stop when all have received the request.
        """
        if self.word is None or self.sync.level(done - 1) == "all":
            return ask
        began = time.perf_counter()
        heard = self.word.after(done, int(self.asked_to_stop()), last=done == goal.steps)
        self.replica.timing.exposed_s += time.perf_counter() - began
        for one in heard:
            self._tell_of_islands(one)
        return max((one.ask for one in heard), default=0)

    def _tell_of_islands(self, heard: ReplicaStatus) -> None:
        losses = tuple(s / w if w else math.nan for s, w in zip(heard.losses, heard.weights, strict=True))
        self.sink(records.Islands(step=heard.step, losses=losses, weights=heard.weights, rejected=heard.rejected))
        islands = self.replica.levels.groups["island"]
        for island in (one for one, is_late in zip(islands, heard.late, strict=True) if is_late):
            said = f"the island of ranks {list(island)} was late: the sync round went on without its parameter changes"
            self.sink(records.Event(level="warning", message=said, step=heard.step, rank=island[0]))
        for island, count in zip(islands, heard.rejected, strict=True):
            if count and self.replica.rank not in island:
                said = f"the island of ranks {list(island)} has rejected {count} of its last steps"
                said += ", as their loss or gradient was not finite"
                self.sink(records.Event(level="error", message=said, step=heard.step, rank=island[0]))
