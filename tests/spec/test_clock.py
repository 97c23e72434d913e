"""The clock beside a simulation that looks at every second by itself, and its figures on lists done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from gossamer.spec.clock import BESIDE, Clock, Part, TimedTask, compute, cost, play, wire

RESOURCES = (compute(0), compute(1), "encoder 0", wire("0>1"), wire("1>0"), BESIDE)


def second_by_second(tasks: Sequence[TimedTask]) -> tuple[list[int], list[int]]:
    """Starts and ends, by brute force; seconds are whole numbers.

    In every second what is over ends, and then the first task of each queue starts if all it waits for is there, until
    nothing changes. What ends in a second has lost nothing to what starts in it.
    """
    starts, ends, lost = dict[int, int](), dict[int, int](), [0.0] * len(tasks)

    def may_start(i: int, now: int) -> bool:
        queue = [k for k in range(i) if tasks[k].on == tasks[i].on != BESIDE]
        part = tasks[i].begins
        return (
            all(k in ends for k in queue)
            and all(k in ends and ends[k] + tasks[k].latency_s <= now for k in tasks[i].after)
            and (part is None or (part.of in starts and now >= starts[part.of] + part.seconds + lost[part.of]))
        )

    for now in range(10_000):
        changed = True
        while changed:
            changed = False
            for i in range(len(tasks)):
                if i in starts and i not in ends and now >= starts[i] + tasks[i].seconds + lost[i]:
                    ends[i], changed = now, True
            for i in range(len(tasks)):
                if i not in starts and may_start(i, now):
                    starts[i], changed = now, True
                    part = tasks[i].steals
                    if part is not None and part.of in starts and part.of not in ends:
                        lost[part.of] += part.seconds
        if len(ends) == len(tasks):
            return [starts[i] for i in range(len(tasks))], [int(ends[i] + t.latency_s) for i, t in enumerate(tasks)]
    raise AssertionError("it does not end")


def drawn(seed: int) -> list[TimedTask]:
    """A list of tasks of random seconds on random resources, that wait for random earlier ones."""
    draw, tasks = Random(seed), list[TimedTask]()
    for number in range(draw.randrange(1, 25)):
        after = tuple(sorted(draw.sample(range(number), min(number, draw.randrange(3)))))
        part = Part(draw.randrange(number), draw.randrange(6)) if number and draw.random() < 0.3 else None
        on = draw.choice(RESOURCES)
        latency = draw.randrange(4) if on.startswith("wire") else 0
        sent = draw.randrange(100) if on.startswith("wire") else 0
        tasks.append(TimedTask(on, draw.randrange(6), after, begins=part, latency_s=latency, sent_bytes=sent))
    return tasks


@pytest.mark.parametrize("seed", range(60))
def test_random_tasks_are_played_as_second_by_second(seed: int) -> None:
    tasks = drawn(seed)
    trace = play(tasks)
    assert (list(trace.starts), list(trace.ends)) == second_by_second(tasks)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_thread_steals_lengthens_the_work_it_steals_from(seed: int) -> None:
    """Buckets fill in a backward pass and a thread takes seconds of it, with a task that waits for its end."""
    draw = Random(100 + seed)
    buckets = sorted(draw.sample(range(21), draw.randrange(1, 7)))
    tasks = [TimedTask(compute(0), 20)]
    for ready in buckets:
        at = len(tasks)
        tasks += [
            TimedTask(BESIDE, 0, begins=Part(0, ready), steals=Part(0, draw.randrange(4))),
            TimedTask("encoder 0", draw.randrange(4), (at,)),
            TimedTask(wire("all"), draw.randrange(6), (at + 1,)),
        ]
    tasks += [
        TimedTask("encoder 0", draw.randrange(4), (3 * b + 3,), steals=Part(0, draw.randrange(4)))
        for b in range(len(buckets))
    ]
    tasks.append(TimedTask(compute(0), 2, (len(tasks) - 1,)))
    trace = play(tasks)
    assert (list(trace.starts), list(trace.ends)) == second_by_second(tasks)
    assert trace.ends[0] == 20 + trace.lost.get(0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_resource_does_one_task_at_a_time_in_the_order_given(seed: int) -> None:
    trace = play(drawn(seed))
    for on in RESOURCES[:-1]:
        mine = [i for i, task in enumerate(trace.tasks) if task.on == on]
        for first, second in pairwise(mine):
            assert trace.starts[second] >= trace.starts[first] + trace.tasks[first].seconds


def test_the_clock_is_pure_and_goes_on_from_a_copy() -> None:
    tasks = drawn(7)
    assert play(tasks) == play(tasks)
    shared = Clock()
    shared.add(tasks[:5])
    for rest in (tasks[5:], tasks[5:9]):
        copy = shared.copy()
        copy.add(rest)
        assert copy.trace() == play([*tasks[:5], *rest])
    assert shared.trace() == play(tasks[:5])


@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_work_and_two_kinds_of_waiting(seed: int) -> None:
    """And no byte is counted twice or left out."""
    trace = play([TimedTask(compute(0), 1), TimedTask(compute(1), 1), *(_later(task) for task in drawn(seed))])
    told = cost(trace)
    assert told.step_s == trace.end_s == pytest.approx(told.compute_s + told.exposed_s + told.bubble_s)
    assert told.exposed_s >= 0 and told.bubble_s >= 0
    assert sum(told.wire_bytes.values()) == sum(task.sent_bytes for task in trace.tasks)
    for link, sent in told.wire_bytes.items():
        assert sent == sum(task.sent_bytes for task in trace.tasks if task.on == wire(link))


def _later(task: TimedTask) -> TimedTask:
    """The same task in a list that has two more before it."""
    part = task.begins if task.begins is None else replace(task.begins, of=task.begins.of + 2)
    return replace(task, after=tuple(n + 2 for n in task.after), begins=part)


def test_the_kinds_of_waiting_are_told_apart() -> None:
    """Rank 1 waits 4 s for rank 0's work and 3 s for its message, which delay nothing; what is sent last does."""
    up, out = wire("0>1"), wire("out")
    tasks = [
        TimedTask(compute(0), 4, holds=10),
        TimedTask(up, 2, (0,), latency_s=1, sent_bytes=8),
        TimedTask(compute(0), 5, frees=10),
        TimedTask(compute(1), 2, (1,), holds=3, frees=3),
        TimedTask(out, 2, (2, 3), sent_bytes=5),
    ]
    told = cost(play(tasks))
    assert told.step_s == 11 and told.compute_s == (9 + 2) / 2 and told.wire_s == 4
    assert told.exposed_s == 2 and told.bubble_s == 9 - (9 + 2) / 2
    assert told.wire_bytes == {"0>1": 8, "out": 5} and told.peak_bytes == (10, 3)


def test_a_message_that_waits_for_its_link_is_waited_for_as_long() -> None:
    tasks = [
        TimedTask(wire("a"), 5),
        TimedTask(compute(0), 1),
        TimedTask(wire("a"), 1, (1,)),
        TimedTask(compute(1), 1, (2,)),
    ]
    told = cost(play(tasks))
    assert told.step_s == 7 and told.exposed_s == 5 and told.bubble_s == 1


def test_memory_is_taken_at_the_start_and_returned_at_the_end() -> None:
    one = [
        TimedTask(compute(0), 1, holds=4),
        TimedTask(compute(0), 1, holds=2, frees=2),
        TimedTask(compute(0), 1, frees=4),
    ]
    assert play([*one, TimedTask(compute(1), 1)]).peak_bytes() == {compute(0): 6, compute(1): 0}
    assert cost(play([TimedTask(compute(0), 1)])).peak_bytes == ()


def test_without_tasks_there_is_no_cost() -> None:
    assert cost(play([])).step_s == 0.0 and play([]).busy_s() == {}
