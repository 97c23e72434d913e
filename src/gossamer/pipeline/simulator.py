"""Simulate a pipeline schedule with durations instead of a model: step time, bubble, peak memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gossamer.pipeline.dependencies import Dependencies
from gossamer.pipeline.executor import ScheduleBackend, execute
from gossamer.pipeline.schedule import Schedule, StageCosts
from gossamer.spec.action import Action, Op


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """One direction between two ranks. Pairs whose links have the same name share it: one message at a time."""

    name: str
    latency_s: float = 0.0
    bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Interval:
    """The time from `start_s` to `end_s` in which `action` kept `rank` busy, or for a send its link."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The simulated time, memory and traffic of a schedule. Lists are by rank."""

    spans: tuple[Interval, ...]  # in order of start
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_chunks: tuple[int, ...]  # most (stage, micro-batch) pairs live at once
    peak_bytes: tuple[int, ...]
    link_bytes: Mapping[str, int]

    @property
    def bubble(self) -> float:
        """Idle fraction of the ranks' time, from 0 to 1; waiting for links is idle time."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0


def forecast(
    schedule: Schedule, costs: Sequence[StageCosts], links: Mapping[tuple[int, int], SimulatedLink] | None = None
) -> SimulationResult:
    """Simulate `schedule` and return its times, memory and traffic.

    `costs` is per stage; `links[(from, to)]` by rank: a pair that is not named has its own link, which takes no time. A
    schedule without transfers is simulated as if they took no time.
    """
    clock = ScheduleSimulator(schedule, costs, links or {})
    execute(schedule, clock)
    return clock.trace()


@dataclass(slots=True)
class ScheduleSimulator(ScheduleBackend):
    """A schedule backend that simulates time and memory.

    A rank does one thing at a time; sends run in the background, receives wait. Rates and durations never vary.
    """

    schedule: Schedule
    costs: Sequence[StageCosts]
    links: Mapping[tuple[int, int], SimulatedLink]
    needs: Dependencies = field(init=False)
    memory: _Memory = field(init=False)
    free_s: list[float] = field(init=False)
    done_s: dict[Action, float] = field(default_factory=dict)
    link_free_s: dict[str, float] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)
    spans: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.costs) == self.schedule.stages, "costs are given per stage"
        self.needs = Dependencies.of(self.schedule)
        self.memory = _Memory(self.schedule, self.costs, self.needs)
        self.free_s = [0.0] * len(self.schedule.ranks)

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.schedule.ranks))

    def ready_s(self, rank: int, action: Action) -> float | None:
        at = self.free_s[rank]
        for need in self.needs(action):
            done = self.done_s.get(need)
            if done is None:
                return None
            at = max(at, done)
        return at

    def do(self, rank: int, action: Action) -> None:
        start_s = self.ready_s(rank, action)
        assert start_s is not None
        if action.op in (Op.SEND_F, Op.SEND_B):
            self._send(rank, action, start_s)
            return
        end_s = start_s + self.costs[action.stage].seconds.get(action.op, 0.0)
        self.memory.do(rank, action)
        self.free_s[rank] = self.done_s[action] = end_s
        self.spans.append(Interval(rank, action, start_s, end_s))

    def _send(self, rank: int, action: Action, start_s: float) -> None:
        # A gradient has the size of the tensor it is the gradient of: what the stage before handed over.
        onward = action.op is Op.SEND_F
        to = self.schedule.rank_of(action.stage + (1 if onward else -1), action.batch)
        size_bytes = self.costs[action.stage if onward else action.stage - 1].boundary_bytes
        link = self.links.get((rank, to), SimulatedLink(f"{rank}-{to}"))
        start_s = max(start_s, self.link_free_s.get(link.name, 0.0))
        end_s = start_s + size_bytes / link.bytes_per_s
        self.link_free_s[link.name] = end_s
        self.link_bytes[link.name] = self.link_bytes.get(link.name, 0) + size_bytes
        self.done_s[action] = end_s + link.latency_s
        self.spans.append(Interval(rank, action, start_s, end_s + link.latency_s))

    def trace(self) -> SimulationResult:
        """Return the result for the actions simulated so far."""
        busy = [0.0] * len(self.schedule.ranks)
        for span in self.spans:
            if span.action.op not in (Op.SEND_F, Op.SEND_B):
                busy[span.rank] += span.end_s - span.start_s
        return SimulationResult(
            spans=tuple(sorted(self.spans, key=lambda s: (s.start_s, s.rank))),
            makespan_s=max((s.end_s for s in self.spans), default=0.0),
            busy_s=tuple(busy),
            peak_chunks=tuple(self.memory.peak_chunks),
            peak_bytes=tuple(self.memory.peak_bytes),
            link_bytes=dict(self.link_bytes),
        )


@dataclass(slots=True)
class _Memory:
    """Bytes each rank holds for micro-batches between forward and the end of backward."""

    schedule: Schedule
    costs: Sequence[StageCosts]
    needs: Dependencies
    held: dict[tuple[int, int], int] = field(default_factory=dict)  # (stage, batch) -> bytes
    away: dict[tuple[int, int], int] = field(default_factory=dict)  # the same, moved out
    chunks: list[int] = field(init=False)
    peak_chunks: list[int] = field(init=False)
    peak_bytes: list[int] = field(init=False)
    now_bytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks, self.peak_chunks, self.peak_bytes, self.now_bytes = (
            [0] * len(self.schedule.ranks) for _ in range(4)
        )

    def do(self, rank: int, action: Action) -> None:
        cost, key = self.costs[action.stage], (action.stage, action.batch)
        match action.op:
            case Op.F:
                recomputes = Action(Op.RECOMPUTE, *key) in self.needs.present
                self._hold(rank, key, cost.kept_bytes if recomputes else cost.live_bytes)
                if not self.schedule.trains:
                    self._drop(rank, key)
            case Op.RECOMPUTE:
                self._drop(rank, key)
                self._hold(rank, key, cost.live_bytes)
            case Op.OFFLOAD:
                self.away[key] = self._drop(rank, key)
            case Op.RELOAD:
                self._hold(rank, key, self.away.pop(key))
            case Op.B | Op.B_WEIGHT:
                self._drop(rank, key)

    def _hold(self, rank: int, key: tuple[int, int], size_bytes: int) -> None:
        self.held[key] = size_bytes
        self.now_bytes[rank] += size_bytes
        self.chunks[rank] += 1
        self.peak_bytes[rank] = max(self.peak_bytes[rank], self.now_bytes[rank])
        self.peak_chunks[rank] = max(self.peak_chunks[rank], self.chunks[rank])

    def _drop(self, rank: int, key: tuple[int, int]) -> int:
        size_bytes = self.held.pop(key)
        self.now_bytes[rank] -= size_bytes
        self.chunks[rank] -= 1
        return size_bytes
