"""The clock: the one model of time. It plays a list of tasks on resources, and gives the cost of what it played.

A resource is a name: `compute(rank)` of a rank's own work, `wire(name)` of a link, any other of a thread beside them.
Whoever knows a piece of a run writes its tasks: `plan.exchange.step_tasks` a step with gradient buckets,
`plan.exchange.sync_period` a round of local updates, `plan._sharding_groups` the gathers of sharded states,
`pipeline.schedule_tasks` a pipeline schedule. Rates and durations never vary. Standard library and `Cost` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from gossamer.spec.cost import Cost

BESIDE = ""  # the resource of a task that waits for no other one: a moment, not work
_COMPUTE, _WIRE = "compute ", "wire "


def compute(rank: int) -> str:
    """Return the name of the resource that does a rank's forward and backward passes."""
    return f"{_COMPUTE}{rank}"


def wire(name: str) -> str:
    """Return the name of the resource that carries the messages of a link."""
    return f"{_WIRE}{name}"


@dataclass(frozen=True, slots=True)
class Part:
    """A share of another task: so many `seconds` of the work of task number `of`."""

    of: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TimedTask:
    """A timed task: it keeps the resource `on` busy for `seconds`, once all tasks of `after` have ended.

    `begins`: not before so much of another task is done. `steals`: what another task loses to this one, if it runs
    when this one starts. `latency_s`: how much later its result arrives, while the resource is free again (of a task
    that nothing steals from). `sent_bytes`: of a message. `holds`, `frees`: the bytes of memory that it takes when it
    starts and returns when it ends. Tasks are named by their number in the list; only earlier ones can be named.
    """

    on: str
    seconds: float
    after: tuple[int, ...] = ()
    begins: Part | None = None
    steals: Part | None = None
    latency_s: float = 0.0
    sent_bytes: int = 0
    holds: int = 0
    frees: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of played tasks: when each started and ended, arrival included, and the seconds it lost to others."""

    tasks: tuple[TimedTask, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    lost: Mapping[int, float]

    @property
    def end_s(self) -> float:
        """Return the end of the last task."""
        return max(self.ends, default=0.0)

    def busy_s(self) -> dict[str, float]:
        """Return the busy seconds of each resource.

        The largest is the time of one repetition, where lists of tasks follow each other without waiting.
        """
        found: dict[str, float] = {}
        for number, task in enumerate(self.tasks):
            found[task.on] = found.get(task.on, 0.0) + task.seconds + self.lost.get(number, 0.0)
        return found

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes of the messages of each link, by its name."""
        found: dict[str, int] = {}
        for task in self.tasks:
            if task.on.startswith(_WIRE):
                name = task.on.removeprefix(_WIRE)
                found[name] = found.get(name, 0) + task.sent_bytes
        return found

    def peak_bytes(self) -> dict[str, int]:
        """Return the most bytes that the tasks of each resource hold at once."""
        held, most = dict[str, int](), dict[str, int]()
        for task in self.tasks:
            now = held.get(task.on, 0) + task.holds
            held[task.on] = now - task.frees
            most[task.on] = max(now, most.get(task.on, 0))
        return most


@dataclass(slots=True)
class Clock:
    """A clock under way: each task that is added starts as early as those before it allow.

    First come, first served on each resource, in the order of adding. A theft counts for what is added after it: so
    tasks that steal are added in the order they start, and what waits for the end of the loser after all of them.
    """

    tasks: list[TimedTask] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)  # by resource
    lost: dict[int, float] = field(default_factory=dict)  # by task

    def add(self, tasks: Iterable[TimedTask]) -> None:
        """Play `tasks` after those added before."""
        played, starts, ends, free, lost = self.tasks, self.starts, self.ends, self.free, self.lost
        for task in tasks:
            on = task.on
            at = free.get(on, 0.0)
            for need in task.after:
                if ends[need] > at:
                    at = ends[need]
            if (part := task.begins) is not None:
                begins = starts[part.of] + part.seconds + lost.get(part.of, 0.0)
                if begins > at:
                    at = begins
            end = at + task.seconds
            if on:
                free[on] = end
            played.append(task)
            starts.append(at)
            ends.append(end + task.latency_s if task.latency_s else end)
            if (part := task.steals) is not None and starts[part.of] <= at < ends[part.of]:
                self._steal(part)

    def _steal(self, part: Part) -> None:
        """Lengthen a task that runs."""
        loser = self.tasks[part.of]
        self.lost[part.of] = self.lost.get(part.of, 0.0) + part.seconds
        end = self.starts[part.of] + loser.seconds + self.lost[part.of]
        self.free[loser.on] = max(self.free[loser.on], end)
        self.ends[part.of] = end

    def copy(self) -> Clock:
        """Return a clock that has played the same tasks and goes on by itself."""
        return Clock([*self.tasks], [*self.starts], [*self.ends], {**self.free}, {**self.lost})

    def trace(self) -> Trace:
        """Return the tasks played so far."""
        return Trace(tuple(self.tasks), tuple(self.starts), tuple(self.ends), dict(self.lost))


def play(tasks: Iterable[TimedTask]) -> Trace:
    """Play a list of tasks from second 0, first come, first served on each resource, in the order given."""
    clock = Clock()
    clock.add(tasks)
    return clock.trace()


def cost(trace: Trace) -> Cost:
    """Return the cost of the played tasks; times are means over the ranks, peak bytes by rank, sent bytes by link.

    A step is a rank's own work (`compute_s`, with the time it loses to others), its waiting for the work of other ranks
    (`bubble_s`), and what is left (`exposed_s`): the seconds that a step would be shorter if nothing but the ranks' own
    work took time. `peak_bytes` is empty where no task says what it holds.
    """
    ranks = _ranks(trace)
    busy, peaks = trace.busy_s(), trace.peak_bytes()
    compute_s = sum(busy[rank] for rank in ranks) / len(ranks) if ranks else 0.0
    alone_s = _work_end(play(_alone(trace)))
    return Cost(
        compute_s=compute_s,
        wire_s=sum((task.seconds for task in trace.tasks if task.on.startswith(_WIRE)), 0.0),
        exposed_s=trace.end_s - alone_s,
        bubble_s=alone_s - compute_s,
        step_s=trace.end_s,
        peak_bytes=tuple(peaks[rank] for rank in ranks) if any(peaks.values()) else (),
        wire_bytes=trace.sent_bytes(),
    )


def _ranks(trace: Trace) -> list[str]:
    """Return the ranks' resources, in the order of the ranks."""
    found = {task.on for task in trace.tasks if task.on.startswith(_COMPUTE)}
    return sorted(found, key=lambda on: int(on.removeprefix(_COMPUTE)))


def _work_end(trace: Trace) -> float:
    """Return when the last of the ranks' own work ended."""
    own = (end for task, end in zip(trace.tasks, trace.ends, strict=True) if task.on.startswith(_COMPUTE))
    return max(own, default=0.0)


def _alone(trace: Trace) -> Iterator[TimedTask]:
    """Yield the tasks of the ranks' own work as long as they took, and all others as if they took no time."""
    for number, task in enumerate(trace.tasks):
        own = task.on.startswith(_COMPUTE)
        seconds = task.seconds + trace.lost.get(number, 0.0) if own else 0.0
        yield replace(task, seconds=seconds, steals=None, latency_s=0.0)
