"""The tasks of a step's last backward pass: buckets fill, are encoded, wait for the wire, and are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from gossamer.plan.exchange.measurements import Option, StepMeasurements
from gossamer.spec.clock import BESIDE, Clock, Part, TimedTask, Trace, compute, cost, wire
from gossamer.spec.cost import Cost

PER_BUCKET = 3  # tasks until its messages have arrived
_BACKWARD, _ENCODER, _WIRE = 0, "encoder 0", wire("all")


def backward_pass(facts: StepMeasurements) -> TimedTask:
    """Return the first task of a step, in which buckets fill."""
    return TimedTask(compute(0), facts.backward_s)


def send_tasks(facts: StepMeasurements, bucket: int, option: Option) -> tuple[TimedTask, TimedTask, TimedTask]:
    """Return the tasks of a bucket until its messages have arrived.

    From when it is full its encoding slows the backward pass, which delays everything after it.
    """
    first = 1 + PER_BUCKET * bucket
    return (
        TimedTask(BESIDE, 0.0, begins=Part(_BACKWARD, facts.buckets[bucket].ready_s), steals=_stolen(facts, option)),
        TimedTask(_ENCODER, option.cpu_s / 2, after=(first,)),
        TimedTask(_WIRE, option.wire_s, after=(first + 1,), sent_bytes=option.sent_bytes),
    )


def decode_task(facts: StepMeasurements, bucket: int, option: Option) -> TimedTask:
    """Return the task that decodes what has arrived; the thread that encodes does it when all buckets are encoded."""
    arrived = PER_BUCKET * (bucket + 1)
    return TimedTask(_ENCODER, option.cpu_s / 2, after=(arrived,), steals=_stolen(facts, option))


def _stolen(facts: StepMeasurements, option: Option) -> Part | None:
    """Return what encoding, or decoding, takes from the backward pass."""
    seconds = facts.stolen * option.cpu_s / 2
    return Part(_BACKWARD, seconds) if seconds > 0 else None


def tasks_of_step(facts: StepMeasurements, chosen: Sequence[Option]) -> tuple[TimedTask, ...]:
    """Return the tasks of a step with the chosen exchange of each bucket.

    One wire and one encoding thread serve buckets in the order in which backward fills them.
    """
    assert len(chosen) == len(facts.buckets)
    sent = (send_tasks(facts, bucket, option) for bucket, option in enumerate(chosen))
    decoded = (decode_task(facts, bucket, option) for bucket, option in enumerate(chosen))
    return (backward_pass(facts), *chain.from_iterable(sent), *decoded)


def step_seconds(facts: StepMeasurements, played: Clock | Trace) -> float:
    """Return the seconds of a step whose tasks were played: the work, what it loses to encoding, and what is exposed.

    The last task ends last: it decodes the last bucket.
    """
    exposed = max(0.0, played.ends[-1] - played.ends[_BACKWARD])
    return facts.compute_s + played.lost.get(_BACKWARD, 0.0) + exposed


def cost_of_step(facts: StepMeasurements, trace: Trace) -> Cost:
    """Return the cost of a step whose tasks were played; `sent_bytes` are those of the rank that sends most."""
    step_s, found = step_seconds(facts, trace), cost(trace)
    times = {"step_s": step_s, "compute_s": step_s - found.exposed_s}
    return found.model_copy(update={**times, "sent_bytes": (sum(found.wire_bytes.values()),)})


def waited_for(facts: StepMeasurements, chosen: Sequence[Option]) -> tuple[float, ...]:
    """Return by bucket the exposed fraction of its time on the wire: what halving that time would save."""
    tasks = tasks_of_step(facts, chosen)
    now, found = _seconds(facts, Clock(), tasks), list[float]()
    played = Clock()
    for bucket in range(len(chosen)):
        at = PER_BUCKET * (bucket + 1)
        played.add(tasks[len(played.tasks) : at])
        half = replace(tasks[at], seconds=tasks[at].seconds / 2)
        saved = now - _seconds(facts, played.copy(), (half, *tasks[at + 1 :]))
        found.append(min(1.0, max(0.0, saved / half.seconds)) if half.seconds else 0.0)
    return tuple(found)


def _seconds(facts: StepMeasurements, clock: Clock, tasks: Iterable[TimedTask]) -> float:
    clock.add(tasks)
    return step_seconds(facts, clock)
