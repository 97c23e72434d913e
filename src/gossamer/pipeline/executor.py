"""The player: the only loop that decides what runs next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from gossamer.pipeline.schedule import Schedule
from gossamer.spec.action import Action
from gossamer.spec.errors import RunFailed


class ScheduleBackend(ABC):
    """Where a schedule is played: one rank of a real run, all stages in one process, a clock."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """The ranks of the schedule whose lists this world works off: its own, or all."""

    @abstractmethod
    def ready_s(self, rank: int, action: Action) -> float | None:
        """When `rank` could start `action`, in the world's own seconds; None: another rank must act before.

        The player starts the earliest. A world without a clock says 0, one that waits inside `do` always does.
        """

    @abstractmethod
    def do(self, rank: int, action: Action) -> None:
        """Do it; what it raises ends the play."""


class ScheduleDeadlock(RunFailed):
    """Every rank waits for another. `waiting` is what each would do next."""

    def __init__(self, waiting: Mapping[int, Action]) -> None:
        super().__init__("no rank can go on: " + ", ".join(f"rank {r} at {a}" for r, a in waiting.items()))
        self.waiting = dict(waiting)


def execute(schedule: Schedule, world: ScheduleBackend) -> None:
    """Do every action of the world's ranks, each list in its order. Raises Stuck when none of them can go on."""
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
