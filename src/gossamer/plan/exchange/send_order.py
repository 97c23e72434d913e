"""The order in which a rank starts the messages of a step: a list schedule of the turns of its communication thread.

A turn of a bucket is what its exchange computes before a message, or after the last reply; the thread does one at a
time. Two schedules are made, of which the shorter one counts:

    few    at most `UNDER_WAY` messages are on their way, or have replies that no turn has taken. The thread takes the
           oldest bucket that has been sent before and has more to send, then the oldest full bucket, then the oldest
           bucket that has only to be decoded: what others wait for goes first.
    deep   of up to `DEEP` buckets: any number of messages is begun; those beyond `UNDER_WAY` wait in a line, and so
           buckets with several messages take turns on the links. The thread takes the oldest bucket of which anything
           can be done.

All ranks compute the order from the same measurements, and every rank keeps to it. Runs that give the memory of buckets
back keep to no such order: they start buckets by a look-ahead, and wait for each turn of that order.

Graham 1966 (list scheduling). The seconds found on the way are those that `spec.clock` gives for the tasks in this
order (`step_tasks`); they are found here because a search asks for thousands of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

from gossamer.comm.channel import UNDER_WAY
from gossamer.comm.comm_thread import order
from gossamer.plan.exchange.measurements import Option, StepMeasurements

MOST_HOPS = 32  # of a message: more are played as so many, each for several
DEEP = 64  # buckets: of more, the two schedules hardly differ, and there is less time for each
_MOST_EVENTS = 4000  # of all buckets, about: where there are thousands of them, hops are fewer

Flight: TypeAlias = tuple[str, float, float, int]  # a message: link, busy_s, latency_s of a hop, hops
Job: TypeAlias = tuple[float, tuple[float, ...], tuple[Flight, ...]]  # ready_s, turns_s, messages


@dataclass(frozen=True, slots=True)
class SendSchedule:
    """The schedule of a step; `step_s` is the length of the step.

    `events`: the turns and the hops of messages in the order in which they start: bucket b for its next turn, ~b for
    the next hop of its message. `slowed_s`: by turn, the seconds that it and the backward pass lose to each other.
    `after`: by the place in `events` of a message that waited in the line, that of the hop whose arrival let it start.
    """

    events: tuple[int, ...]
    slowed_s: tuple[float, ...]
    step_s: float
    after: Mapping[int, int] = field(default_factory=dict)

    @property
    def turns(self) -> tuple[int, ...]:
        """Return the bucket of each turn, in order."""
        return tuple(one for one in self.events if one >= 0)


def job_of(ready_s: float, option: Option) -> Job:
    """Return the turns and messages of one bucket, full after `ready_s` of the backward pass."""
    messages = tuple((one.link, one.busy_s, one.latency_s, one.hops) for one in option.messages)
    return ready_s, option.thread_s, messages


def schedule(facts: StepMeasurements, chosen: Sequence[Option]) -> SendSchedule:
    """Return the schedule of a step with the chosen exchange of each bucket."""
    assert len(chosen) == len(facts.buckets)
    return schedule_jobs(facts, [job_of(b.ready_s, one) for b, one in zip(facts.buckets, chosen, strict=True)])


def most_hops(buckets: int) -> int:
    """Return how many hops a message is played in, at most, in a step of so many buckets."""
    most = MOST_HOPS if buckets <= DEEP else MOST_HOPS // 2
    return max(1, min(most, _MOST_EVENTS // max(1, buckets)))


@dataclass(slots=True)
class _Flights:
    """The messages under way, hop by hop, and the turns that they have made ready. Others wait in `line`."""

    jobs: Sequence[Job]
    most: int  # hops that a message is played in
    free: dict[str, float] = field(default_factory=dict)  # by link, when the bytes under way have left it
    arriving: list[tuple[float, int, int, int]] = field(default_factory=list)  # heap: when, bucket, turn, hops to come
    sending: list[tuple[int, int]] = field(default_factory=list)  # heap: bucket, turn with a message behind it
    ending: list[tuple[int, int]] = field(default_factory=list)  # heap: bucket, last turn
    events: list[int] = field(default_factory=list)
    line: deque[tuple[int, int]] = field(default_factory=deque)  # bucket, turn
    under_way: int = 0
    last: dict[int, int] = field(default_factory=dict)  # by bucket, the event of its latest hop
    after: dict[int, int] = field(default_factory=dict)  # by event of a message that waited, the one that ended that

    def send(self, now: float, job: int, turn: int) -> None:
        """Start the message before `turn`, once there are few enough under way."""
        if self.under_way == UNDER_WAY:
            self.line.append((job, turn))
        else:
            self.under_way += 1
            self._start(now, job, turn, 0)

    def _start(self, now: float, job: int, turn: int, left: int) -> None:
        """Put a hop of the message before `turn` on its link; `left`: hops to come with it, 0: all."""
        link, busy_s, latency_s, hops = self.jobs[job][2][turn - 1]
        parts = min(hops, self.most)
        self.free[link] = max(now, self.free.get(link, 0.0)) + busy_s / parts
        heappush(self.arriving, (self.free[link] + latency_s * hops / parts, job, turn, (left or parts) - 1))
        self.last[job] = len(self.events)
        self.events.append(~job)

    def arrive(self, now: float) -> None:
        """Let everything arrive that does until `now`."""
        arriving = self.arriving
        while arriving and arriving[0][0] <= now:
            when, job, turn, left = heappop(arriving)
            if left:
                self._start(when, job, turn, left)
                continue
            heappush(self.sending if turn < len(self.jobs[job][2]) else self.ending, (job, turn))
            if self.line:
                self.after[len(self.events)] = self.last[job]
                self._start(when, *self.line.popleft(), 0)
            else:
                self.under_way -= 1


def schedule_jobs(facts: StepMeasurements, jobs: Sequence[Job]) -> SendSchedule:
    """Return the shorter of the schedules of `jobs`, which are full in their order; see the module.

    While the backward pass runs, a turn and the pass share processors: each of its seconds makes both later by `stolen`
    seconds, and so all buckets that are not yet full.
    """
    if facts.look_ahead is not None:
        return _played(facts, jobs, fixed=order([len(one[2]) for one in jobs], facts.look_ahead))
    few = _played(facts, jobs)
    if not UNDER_WAY < len(jobs) <= DEEP:
        return few
    deep = _played(facts, jobs, is_deep=True)
    return deep if deep.step_s < few.step_s else few


def _played(
    facts: StepMeasurements, jobs: Sequence[Job], *, is_deep: bool = False, fixed: Sequence[tuple[int, int]] = ()
) -> SendSchedule:
    """Play the turns of `jobs`: those of `fixed` in order, or whatever can be done."""
    backward_s, stolen, count = facts.backward_s, facts.stolen, len(jobs)
    flights, slowed = _Flights(jobs, most_hops(count)), list[float]()
    arriving, sending, ending = flights.arriving, flights.sending, flights.ending
    now, lost, fresh, begun = 0.0, 0.0, 0, 0
    most = DEEP if is_deep else UNDER_WAY
    left = sum(len(job[1]) for job in jobs)
    while left:
        flights.arrive(now)
        if fixed:
            job, turn = fixed[len(slowed)]
            waits = sending if turn < len(jobs[job][2]) else ending
            if turn and (job, turn) in waits:
                waits.remove((job, turn))
            elif turn or jobs[job][0] + lost > now:
                full = arriving[0][0] if turn else jobs[job][0] + lost
                now = min(full, arriving[0][0]) if arriving else full
                continue
        elif sending and not (is_deep and ending and ending[0] < sending[0]):
            job, turn = heappop(sending)
            begun -= 1
        elif fresh < count and begun < most and jobs[fresh][0] + lost <= now and not (is_deep and ending):
            job, turn, fresh = fresh, 0, fresh + 1
        elif ending:
            job, turn = heappop(ending)
            begun -= 1
        else:  # nothing to do until something arrives or a bucket fills
            full = jobs[fresh][0] + lost if fresh < count and begun < most else arriving[0][0]
            now = min(full, arriving[0][0]) if arriving else full
            continue
        _, turns_s, messages = jobs[job]
        slow = stolen * min(turns_s[turn], max(0.0, backward_s + lost - now))
        now += turns_s[turn] + slow
        lost += slow
        flights.events.append(job)
        slowed.append(slow)
        left -= 1
        if turn < len(messages):
            flights.arrive(now)  # hops that go on meanwhile are first
            flights.send(now, job, turn + 1)
            begun += 1
    exposed = max(0.0, now - backward_s - lost) if jobs else 0.0
    return SendSchedule(tuple(flights.events), tuple(slowed), facts.compute_s + lost + exposed, flights.after)


def least_seconds(facts: StepMeasurements, jobs: Sequence[Job]) -> float:
    """Return a lower bound of the step's length with `jobs`, in one pass over them."""
    after, bound = dict[str, float](), 0.0  # by link: its busy seconds from a bucket on
    cpu_s = flight_s = 0.0
    for ready_s, turns_s, messages in reversed(jobs):
        own_s = sum(turns_s)
        cpu_s += own_s
        for link, busy_s, latency_s, hops in messages:
            after[link] = after.get(link, 0.0) + busy_s
            alone_s = busy_s + hops * latency_s
            flight_s += alone_s
            own_s += alone_s
        bound = max(bound, ready_s + max(own_s, cpu_s, flight_s / UNDER_WAY, *after.values()))
    return facts.compute_s + max(0.0, bound - facts.backward_s)


def unhidden_seconds(facts: StepMeasurements, jobs: Sequence[Job]) -> float:
    """Return the seconds that `jobs` add to a step in whatever order their messages start.

    The last bucket is encoded, sent and decoded after the backward pass. What others take of the communication thread
    beyond the time for which the last bucket is on its way slows the backward pass by `stolen` of it, or is waited for.
    """
    if not jobs:
        return 0.0
    ready_s, turns_s, messages = jobs[-1]
    flight_s = sum(busy_s + hops * latency_s for _, busy_s, latency_s, hops in messages)
    others_s = sum(sum(own) for _, own, _ in jobs[:-1])
    late_s = max(0.0, ready_s + sum(turns_s) + flight_s - facts.backward_s)
    return late_s + min(1.0, facts.stolen) * max(0.0, others_s - flight_s)
