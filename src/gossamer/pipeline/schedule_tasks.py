"""The tasks of a pipeline schedule: durations, messages and memory instead of a model, for the clock to play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gossamer.pipeline.dependencies import Dependencies
from gossamer.pipeline.executor import ScheduleBackend, execute
from gossamer.pipeline.schedule import Schedule, StageCosts
from gossamer.spec.action import Action, Op
from gossamer.spec.clock import Clock, TimedTask, compute, cost, play, wire
from gossamer.spec.cost import Cost
from gossamer.spec.network import Link


@dataclass(frozen=True, slots=True)
class NamedLink:
    """One direction between two ranks. Pairs whose links have the same name share it: one message at a time."""

    name: str
    link: Link


Links = Mapping[tuple[int, int], NamedLink]  # by (from, to) of a replica's ranks
NO_LINKS: Links = MappingProxyType({})


def cost_of_schedule(schedule: Schedule, costs: Sequence[StageCosts], links: Links = NO_LINKS) -> Cost:
    """Return the cost of `schedule`: step, waiting for messages, bubble, peak memory and bytes by link."""
    return cost(play(tasks_of_schedule(schedule, costs, links)))


def tasks_of_schedule(
    schedule: Schedule, costs: Sequence[StageCosts], links: Links = NO_LINKS
) -> tuple[TimedTask, ...]:
    """Return the tasks of `schedule`, in the order in which its ranks and links come to them.

    `costs` is per stage; a pair of ranks without a link has its own, which takes no time. A schedule without transfers
    is played as if they took no time. A rank does one thing at a time; sends run in the background, receives wait.
    """
    writer = _TaskWriter(schedule, costs, links)
    execute(schedule, writer)
    return tuple(writer.clock.tasks)


@dataclass(slots=True)
class _TaskWriter(ScheduleBackend):
    """A schedule backend that writes down the tasks; its clock says whose turn it is on a link that ranks share."""

    schedule: Schedule
    costs: Sequence[StageCosts]
    links: Links
    clock: Clock = field(default_factory=Clock)
    needs: Dependencies = field(init=False)
    memory: _Memory = field(init=False)
    done: dict[Action, int] = field(default_factory=dict)  # the number of its task
    latest: dict[int, int] = field(default_factory=dict)  # by rank

    def __post_init__(self) -> None:
        assert len(self.costs) == self.schedule.stages, "costs are given per stage"
        self.needs = Dependencies.of(self.schedule)
        self.memory = _Memory(self.schedule, self.costs, self.needs)
        self.clock.add(TimedTask(compute(rank), 0.0) for rank, row in enumerate(self.schedule.ranks) if not row)

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.schedule.ranks))

    def ready_s(self, rank: int, action: Action) -> float | None:
        at = self.clock.free.get(compute(rank), 0.0)
        for need in self.needs(action):
            if need not in self.done:
                return None
            at = max(at, self.clock.ends[self.done[need]])
        return at

    def do(self, rank: int, action: Action) -> None:
        after = tuple(self.done[need] for need in self.needs(action))
        self.done[action] = len(self.clock.tasks)
        if action.op in (Op.SEND_F, Op.SEND_B):
            before = (self.latest[rank],) if rank in self.latest else ()
            self.clock.add([self._sent(rank, action, (*before, *after))])
            return
        self.latest[rank] = len(self.clock.tasks)
        seconds = self.costs[action.stage].seconds.get(action.op, 0.0)
        holds, frees = self.memory.change(action)
        self.clock.add([TimedTask(compute(rank), seconds, after, holds=holds, frees=frees)])

    def _sent(self, rank: int, action: Action, after: tuple[int, ...]) -> TimedTask:
        # A gradient has the size of the tensor it is the gradient of: what the stage before handed over.
        onward = action.op is Op.SEND_F
        to = self.schedule.rank_of(action.stage + (1 if onward else -1), action.batch)
        size_bytes = self.costs[action.stage if onward else action.stage - 1].boundary_bytes
        named = self.links.get((rank, to))
        if named is None:  # a link of which nothing is known takes no time
            return TimedTask(wire(f"{rank}>{to}"), 0.0, after, sent_bytes=size_bytes)
        seconds = size_bytes / named.link.bytes_per_s
        return TimedTask(wire(named.name), seconds, after, latency_s=named.link.latency_s, sent_bytes=size_bytes)


@dataclass(slots=True)
class _Memory:
    """The bytes that ranks hold for micro-batches between forward and the end of backward."""

    schedule: Schedule
    costs: Sequence[StageCosts]
    needs: Dependencies
    held: dict[tuple[int, int], int] = field(default_factory=dict)  # by (stage, batch)
    away: dict[tuple[int, int], int] = field(default_factory=dict)  # the same, moved out

    def change(self, action: Action) -> tuple[int, int]:
        """Return the bytes that an action takes when it starts, and those that it returns when it ends."""
        costs, key = self.costs[action.stage], (action.stage, action.batch)
        match action.op:
            case Op.F:
                recomputes = Action(Op.RECOMPUTE, *key) in self.needs.present
                self.held[key] = costs.kept_bytes if recomputes else costs.live_bytes
                return self.held[key], 0 if self.schedule.trains else self.held.pop(key)
            case Op.RECOMPUTE:
                before, self.held[key] = self.held[key], costs.live_bytes
                return costs.live_bytes - before, 0
            case Op.OFFLOAD:
                self.away[key] = self.held.pop(key)
                return 0, self.away[key]
            case Op.RELOAD:
                self.held[key] = self.away.pop(key)
                return self.held[key], 0
            case Op.B | Op.B_WEIGHT:
                return 0, self.held.pop(key)
        return 0, 0
