"""The order of a step's messages: what is ready goes first, and the clock gives the same seconds for it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gossamer.comm.channel import UNDER_WAY
from gossamer.comm.comm_thread import order
from gossamer.plan.exchange import BucketMeasurements, Option, PricedMessage, StepMeasurements, schedule, tasks_of_step
from gossamer.plan.exchange.send_order import DEEP, job_of, least_seconds, schedule_jobs, unhidden_seconds
from gossamer.plan.exchange.step_tasks import step_seconds
from gossamer.spec.clock import play


def step_of(*options: Option, ready: list[float] | None = None, stolen: float = 0.0) -> StepMeasurements:
    """A backward pass of one second, whose buckets are full at `ready`, or one after the other."""
    at = ready or [(b + 1) / len(options) for b in range(len(options))]
    buckets = (BucketMeasurements((f"w{b}",), 1, at[b], 0.0, (one,)) for b, one in enumerate(options))
    return StepMeasurements(tuple(buckets), compute_s=1.5, backward_s=1.0, stolen=stolen)


def message(busy_s: float, latency_s: float = 0.0, link: str = "all") -> PricedMessage:
    return PricedMessage(busy_s, latency_s, link)


def two_rounds(cpu_s: float, busy_s: float, latency_s: float) -> Option:
    both = message(busy_s, latency_s)
    return Option((cpu_s, cpu_s, cpu_s), (both, both), 8, 0.0)


def drawn(seed: int) -> tuple[StepMeasurements, list[Option]]:
    """A step with up to 30 buckets, of no to four messages each, on two links."""
    rng = Random(seed)
    options = []
    for _ in range(rng.randint(1, 30)):
        cpu, wire, late = (10 ** rng.uniform(-5, 0) for _ in range(3))
        messages = tuple(
            PricedMessage(wire * rng.random(), late * rng.random(), rng.choice(["all", "island"]), rng.randint(1, 9))
            for _ in range(rng.randint(0, 4))
        )
        options.append(Option(tuple(cpu * rng.random() for _ in range(len(messages) + 1)), messages, 8, 0.0))
    return step_of(*options, stolen=rng.choice([0.0, 0.4, 1.0])), options


@pytest.mark.parametrize("seed", range(60))
def test_the_clock_plays_what_was_scheduled(seed: int) -> None:
    """To the last bit but of sums; no bound is above it; every turn is there, and each bucket's come in order."""
    facts, options = drawn(seed)
    found = schedule(facts, options)
    assert step_seconds(facts, play(tasks_of_step(facts, options, found))) == pytest.approx(found.step_s, rel=1e-12)
    assert least_seconds(facts, [job_of(b.ready_s, one) for b, one in zip(facts.buckets, options, strict=True)]) <= (
        found.step_s * (1 + 1e-12)
    )
    assert sorted(found.turns) == [b for b, one in enumerate(options) for _ in one.turns_s]


@pytest.mark.parametrize("seed", range(20))
def test_no_more_messages_are_begun_than_a_schedule_may_hold(seed: int) -> None:
    """Whenever replies arrive: it is the order alone that says how many. Those that wait in the line are said."""
    facts, options = drawn(seed)
    found = schedule(facts, options)
    taken, most, now = [0] * len(options), 0, 0
    for bucket in found.turns:
        turn, count = taken[bucket], len(options[bucket].messages)
        now += int(turn < count) - int(turn > 0)
        most, taken[bucket] = max(most, now), turn + 1
    assert most <= (DEEP if found.after else UNDER_WAY)


def test_buckets_of_several_messages_take_turns_where_they_are_more_than_may_be_under_way() -> None:
    """Nine buckets of two messages, each all latency: eight at a time end after 4 s, in turns after 3 s."""
    nine = [two_rounds(0.0, 0.0, 1.0)] * (UNDER_WAY + 1)
    facts = step_of(*nine, ready=[1.0] * len(nine))
    found = schedule(facts, nine)
    assert found.step_s == pytest.approx(1.5 + 3.0)
    assert step_seconds(facts, play(tasks_of_step(facts, nine, found))) == pytest.approx(found.step_s)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_a_run_without_a_planned_order_is_timed_by_its_look_ahead(seed: int, look_ahead: int) -> None:
    """The clock gives the same seconds; the turns are those that the communication thread takes by itself."""
    facts, options = drawn(seed)
    facts = replace(facts, look_ahead=look_ahead)
    found = schedule(facts, options)
    assert step_seconds(facts, play(tasks_of_step(facts, options, found))) == pytest.approx(found.step_s, rel=1e-12)
    assert found.turns == tuple(job for job, _ in order([len(one.messages) for one in options], look_ahead))
    assert least_seconds(facts, [job_of(b.ready_s, one) for b, one in zip(facts.buckets, options, strict=True)]) <= (
        found.step_s * (1 + 1e-12)
    )


def test_a_look_ahead_waits_longer_than_a_planned_order() -> None:
    """Twenty buckets of four messages, each a hop of 0.1 s: planned, eight are under way all the time; by a look-ahead
    of two buckets the last one's first message begins after nine hops.
    """
    one = Option((0.0,) * 5, (message(0.0, 0.1),) * 4, 8, 0.0)
    planned = step_of(*[one] * 20, ready=[1.0] * 20)
    waits = [schedule(facts, [one] * 20).step_s - 1.5 for facts in (planned, replace(planned, look_ahead=2))]
    assert waits == pytest.approx([80 * 0.1 / 8, (9 + 4) * 0.1])


def test_a_second_message_does_not_wait_for_buckets_that_are_not_full() -> None:
    """The first bucket's reply is there at 0.3; the others fill much later. By look-ahead it would wait for them."""
    facts = step_of(*[two_rounds(0.0, 0.05, 0.0)] * 4, ready=[0.2, 0.9, 0.95, 1.0])
    assert schedule(facts, [b.options[0] for b in facts.buckets]).turns[:3] == (0, 0, 0)  # type: ignore[misc]


def test_a_full_bucket_goes_before_what_only_has_to_be_decoded() -> None:
    one = Option((0.0, 0.1), (message(0.1),), 8, 0.0)
    facts = step_of(one, one, ready=[0.4, 0.5])
    assert schedule(facts, [one, one]).turns == (0, 1, 0, 1)


def test_latencies_pass_beside_each_other_and_bytes_one_after_the_other() -> None:
    one = Option((0.0, 0.0), (message(0.1, 1.0),), 8, 0.0)
    facts = step_of(*[one] * 4, ready=[1.0] * 4)
    assert schedule(facts, [one] * 4).step_s == pytest.approx(1.5 + 4 * 0.1 + 1.0)
    many = step_of(*[one] * (2 * UNDER_WAY), ready=[1.0] * (2 * UNDER_WAY))
    assert schedule(many, [one] * (2 * UNDER_WAY)).step_s > 1.5 + 2 * 1.0, "of as many as may be under way"


def test_a_link_carries_other_messages_while_a_hop_is_on_its_way() -> None:
    """Eight hops of 0.1 s and 0.16 s of bytes: five of them take little longer than one, and eight what bytes take."""
    one = Option((0.0, 0.0), (PricedMessage(0.16, 0.1, "all", 8),), 8, 0.0)
    for count, step_s in ((1, 0.96), (5, 0.96 + 4 * 0.02), (8, 8 * 0.16 + 0.1)):
        facts = step_of(*[one] * count, ready=[1.0] * count)
        assert schedule(facts, [one] * count).step_s == pytest.approx(1.5 + step_s)


def test_links_carry_bytes_at_the_same_time() -> None:
    near, far = (Option((0.0, 0.0), (message(0.4, link=link),), 8, 0.0) for link in ("island", "all"))
    facts = step_of(near, far, ready=[1.0, 1.0])
    assert schedule(facts, [near, far]).step_s == pytest.approx(1.5 + 0.4)
    assert schedule(facts, [far, far]).step_s == pytest.approx(1.5 + 0.8)


def test_what_encoding_takes_from_the_backward_pass_makes_it_longer() -> None:
    """0.4 s in two turns, both while the pass runs, so that it is longer by what they take."""
    one = Option((0.2, 0.2), (message(0.1),), 8, 0.0)
    assert [schedule(step_of(one, ready=[0.2], stolen=s), [one]).step_s for s in (0.0, 0.5, 1.0)] == pytest.approx(
        [1.5, 1.7, 1.9]
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_order_hides_what_is_said_to_be_unhidden(seed: int) -> None:
    """In the planned order, and with any bucket's messages much shorter or on a link of their own."""
    facts, options = drawn(seed)
    jobs = [job_of(b.ready_s, one) for b, one in zip(facts.buckets, options, strict=True)]
    least_s = facts.compute_s + unhidden_seconds(facts, jobs)
    assert least_s <= schedule_jobs(facts, jobs).step_s * (1 + 1e-12)
    free = [(r, t, tuple((f"own {b}", *one[1:]) for one in m)) for b, (r, t, m) in enumerate(jobs)]
    assert least_s <= schedule_jobs(facts, free).step_s * (1 + 1e-12)


def test_of_a_single_bucket_all_is_unhidden_that_comes_after_backward() -> None:
    one = Option((0.3, 0.2), (message(0.4, 0.1),), 8, 0.0)
    facts = step_of(one, ready=[0.8], stolen=0.0)
    jobs = [job_of(0.8, one)]
    assert unhidden_seconds(facts, jobs) == pytest.approx(0.8)
    assert facts.compute_s + unhidden_seconds(facts, jobs) == pytest.approx(schedule(facts, [one]).step_s)
    assert unhidden_seconds(step_of(), []) == 0.0
