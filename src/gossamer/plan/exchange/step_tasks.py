"""The tasks of a step's last backward pass: buckets fill, are encoded, wait for the wire, and are decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gossamer.plan.exchange.measurements import Option, StepMeasurements
from gossamer.plan.exchange.send_order import SendSchedule, job_of, most_hops, schedule, schedule_jobs
from gossamer.spec.clock import Clock, Part, TimedTask, Trace, compute, cost, wire
from gossamer.spec.cost import Cost

_BACKWARD, _THREAD = 0, "communication 0"


def tasks_of_step(
    facts: StepMeasurements, chosen: Sequence[Option], scheduled: SendSchedule | None = None
) -> tuple[TimedTask, ...]:
    """Return the tasks of a step with the chosen exchange of each bucket.

    One communication thread encodes and decodes, in the order of the schedule. The bytes of a hop follow those before
    it on its link, its latency passes beside them.
    """
    assert len(chosen) == len(facts.buckets)
    return tuple(_tasks(facts, chosen, scheduled or schedule(facts, chosen)))


def _tasks(facts: StepMeasurements, chosen: Sequence[Option], scheduled: SendSchedule) -> Iterator[TimedTask]:
    yield TimedTask(compute(0), facts.backward_s)
    slowed, most = iter(scheduled.slowed_s), most_hops(len(chosen))
    taken, hops, turns_s = [0] * len(chosen), [0] * len(chosen), [one.thread_s for one in chosen]
    latest: list[tuple[int, ...]] = [()] * len(chosen)  # the task of each bucket that its next one waits for
    for number, event in enumerate(scheduled.events, 1):
        bucket = event if event >= 0 else ~event
        turn, option = taken[bucket], chosen[bucket]
        if event >= 0:
            slow, begins = next(slowed), None if turn else Part(_BACKWARD, facts.buckets[bucket].ready_s)
            stolen = Part(_BACKWARD, slow) if slow else None
            yield TimedTask(_THREAD, turns_s[bucket][turn] + slow, latest[bucket], begins=begins, steals=stolen)
            taken[bucket], hops[bucket] = turn + 1, 0
        else:
            one = option.messages[turn - 1]
            parts, first = min(one.hops, most), turn == 1 and not hops[bucket]
            sent = option.sent_bytes if first else 0  # of the whole exchange, counted once
            late, freed = one.latency_s * one.hops / parts, scheduled.after.get(number - 1)
            after = latest[bucket] if freed is None else (*latest[bucket], freed + 1)
            yield TimedTask(wire(one.link), one.busy_s / parts, after, latency_s=late, sent_bytes=sent)
            hops[bucket] += 1
        latest[bucket] = (number,)


def step_seconds(facts: StepMeasurements, played: Clock | Trace) -> float:
    """Return the seconds of a step whose tasks were played: the work, what it loses to encoding, and what is exposed.

    The last task is the thread's last turn, which ends last.
    """
    exposed = max(0.0, played.ends[-1] - played.ends[_BACKWARD])
    return facts.compute_s + played.lost.get(_BACKWARD, 0.0) + exposed


def cost_of_step(facts: StepMeasurements, trace: Trace) -> Cost:
    """Return the cost of a step whose tasks were played; `sent_bytes` are those of the rank that sends most."""
    step_s, found = step_seconds(facts, trace), cost(trace)
    times = {"step_s": step_s, "compute_s": step_s - found.exposed_s}
    return found.model_copy(update={**times, "sent_bytes": (sum(found.wire_bytes.values()),)})


def waited_for(
    facts: StepMeasurements, chosen: Sequence[Option], runs: Sequence[Sequence[int]] = ()
) -> tuple[float, ...]:
    """Return by run of buckets the exposed fraction of its bytes' time on the wire: what halving that time would save.

    Without `runs` each bucket is one.
    """
    jobs = [job_of(bucket.ready_s, option) for bucket, option in zip(facts.buckets, chosen, strict=True)]
    now, found = schedule_jobs(facts, jobs).step_s, list[float]()
    for run in runs or [[bucket] for bucket in range(len(chosen))]:
        halved = [*jobs]
        for bucket in run:
            ready_s, turns_s, messages = jobs[bucket]
            halved[bucket] = ready_s, turns_s, tuple((k, busy / 2, late, hops) for k, busy, late, hops in messages)
        half_s = sum(busy for bucket in run for _, busy, _, _ in halved[bucket][2])
        saved = now - schedule_jobs(facts, halved).step_s if half_s else 0.0
        found.append(min(1.0, max(0.0, saved / half_s)) if half_s else 0.0)
    return tuple(found)
