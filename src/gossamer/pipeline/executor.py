"""The schedule runtime: the only loop that decides which action runs next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from gossamer.pipeline.schedule import Schedule
from gossamer.spec.action import Action
from gossamer.spec.errors import RunFailed


class ScheduleBackend(ABC):
    """A backend that runs the actions of a schedule: one rank of a real run, all stages in one process, none."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """The ranks of the schedule whose lists this backend runs: its own rank, or all."""

    @abstractmethod
    def ready_s(self, rank: int, action: Action) -> float | None:
        """Return when `rank` could start `action`, in the backend's own seconds; None: another rank must act before.

        The executor starts the earliest action. A backend without a clock returns 0 or None, one that waits inside `do`
        always 0.
        """

    @abstractmethod
    def do(self, rank: int, action: Action) -> None:
        """Run the action; an exception ends the execution."""


class ScheduleDeadlock(RunFailed):
    """The error that every rank waits for another (a deadlock). `waiting` is the next action of each rank."""

    def __init__(self, waiting: Mapping[int, Action]) -> None:
        at = ", ".join(f"rank {r} at {a}" for r, a in waiting.items())
        super().__init__(f"pipeline schedule deadlocks, as every rank waits for another one: {at}")
        self.waiting = dict(waiting)


def execute(schedule: Schedule, world: ScheduleBackend) -> None:
    """Run every action of the backend's ranks, each rank's list in its order.

    Raises ScheduleDeadlock when none of the ranks can continue.
    """
    left = {rank: iter(schedule.ranks[rank]) for rank in world.ranks}
    waiting = {rank: action for rank, actions in left.items() if (action := next(actions, None)) is not None}
    while waiting:
        ready = {rank: at for rank, action in waiting.items() if (at := world.ready_s(rank, action)) is not None}
        if not ready:
            raise ScheduleDeadlock(waiting)
        rank = min(ready, key=ready.__getitem__)
        world.do(rank, waiting[rank])
        following = next(left[rank], None)
        if following is None:
            del waiting[rank]
        else:
            waiting[rank] = following
