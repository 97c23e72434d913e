"""The event simulator of one step's exchange, on steps that are computed by hand."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from gossamer.plan.exchange import BucketMeasurements, Option, PricedMessage, StepMeasurements, schedule

SOURCE = Path(__file__).parents[2] / "benchmarks" / "auto" / "simulator.py"
_spec = importlib.util.spec_from_file_location("auto_simulator", SOURCE)
assert _spec is not None and _spec.loader is not None
simulator = importlib.util.module_from_spec(_spec)
sys.modules["auto_simulator"] = simulator  # dataclasses look their module up by name
_spec.loader.exec_module(simulator)

Job, Link, Message, Step, simulate = (
    simulator.Job,
    simulator.Link,
    simulator.Message,
    simulator.Step,
    simulator.simulate,
)
# 100 bytes/s and 1 s of latency; the backward pass is the last 10 of 20 s.
LINKS = {"all": Link(latency_s=1.0, bytes_per_s=100.0)}
BASE: dict[str, Any] = {"links": LINKS, "compute_s": 20.0, "backward_s": 10.0, "stolen": 0.0}


def step(*jobs: Any, **changed: Any) -> Any:
    return simulate(jobs, **{**BASE, **changed})


def one(ready_s: float, nbytes: int, hops: int = 1, *, turns: tuple[float, ...] = (0.0, 0.0), wire: str = "all") -> Any:
    return Job(ready_s, turns, (Message(nbytes, hops, wire),))


def test_nothing_to_exchange_is_the_compute_alone() -> None:
    assert step() == Step(20.0, 0.0, ())


def test_one_bucket_at_the_end_is_encode_bytes_latencies_decode() -> None:
    # 0.5 s of encoding, 6 s of bytes, 4 latencies, 0.25 s of decoding
    assert step(one(10.0, 600, 4, turns=(0.5, 0.25))) == Step(30.75, 10.75, (0, 0))


def test_an_exchange_that_ends_within_the_backward_pass_is_hidden() -> None:
    assert step(one(2.0, 600, 1, turns=(0.5, 0.25))) == Step(20.0, 0.0, (0, 0))
    assert step(one(4.0, 600, 1, turns=(0.5, 0.25))).step_s == 21.75


def test_more_hops_than_events_keep_the_sums_of_bytes_and_latencies() -> None:
    assert step(one(10.0, 1000, 126)).exposed_s == pytest.approx(10.0 + 126.0)


def test_a_message_of_no_hops_arrives_at_once() -> None:
    assert step(one(10.0, 0, 0)) == Step(20.0, 0.0, (0, 0))


def test_latencies_of_two_buckets_pass_at_the_same_time() -> None:
    # Bytes of the first: 10 to 12, of the second: 12 to 14; arrivals at 13 and 15. End to end it were 16.
    assert step(one(10.0, 200), one(10.0, 200)).exposed_s == 5.0


def test_hops_of_two_messages_take_turns_on_the_wire() -> None:
    # Two hops of 2 s each: A 10-12, B 12-14, A (ready at 13) 14-16, B (ready at 15) 16-18; arrived at 17 and 19.
    both = step(one(10.0, 400, 2, turns=(0.0, 0.5)), one(10.0, 400, 2, turns=(0.0, 0.5)))
    assert both.exposed_s == 9.5


def test_a_latency_of_one_message_is_filled_by_the_bytes_of_another() -> None:
    # A: 0.5 s of bytes twice, B: 3 s once. A 10-10.5, B 10.5-13.5, A (ready at 11.5) waits: 13.5-14, arrived at 15.
    assert step(one(10.0, 100, 2), one(10.0, 300, 1)).exposed_s == 5.0


def test_a_hop_that_is_ready_first_is_sent_first() -> None:
    # The second bucket is full first. Its 5 s of bytes (8-13) hold the first bucket's up: 13-14, arrived at 15.
    assert step(one(9.0, 100), one(8.0, 500), order="ready") == Step(25.0, 5.0, (1, 0, 1, 0))
    # In the order of the jobs the first one's bytes go 9-10, the second one's 10-15.
    assert step(one(9.0, 100), one(8.0, 500), order=4) == Step(26.0, 6.0, (0, 1, 0, 1))


def test_wires_do_not_wait_for_each_other() -> None:
    links = {**LINKS, "slow": Link(latency_s=3.0, bytes_per_s=10.0)}
    assert step(one(10.0, 200), one(10.0, 20, wire="slow"), links=links).exposed_s == 5.0
    assert step(one(10.0, 200), one(10.0, 20, wire="all"), links=links).exposed_s == pytest.approx(3.2)


def test_at_most_so_many_messages_are_under_way() -> None:
    jobs = [one(10.0, 100) for _ in range(4)]
    # One at a time: 4 times (1 s + 1 s). Two are enough here: a latency is as long as the bytes of the other one.
    assert step(*jobs, at_once=1).exposed_s == 8.0
    assert step(*jobs, at_once=2).exposed_s == 5.0
    # A hundredth of the bytes: the third starts as the first has arrived (11.01), the fourth ends at 11.03 + 1.
    small = [one(10.0, 1) for _ in range(4)]
    assert step(*small, at_once=2).exposed_s == pytest.approx(2.03)
    assert step(*small, at_once=4).exposed_s == pytest.approx(1.04)


def test_the_thread_plays_one_turn_at_a_time() -> None:
    # Encodings 10-11 and 11-12; the first is back at 12 (0 bytes, 1 s), decoded 12-14; the second 14-16.
    assert step(*[one(10.0, 0, 1, turns=(1.0, 2.0))] * 2).exposed_s == 6.0


def test_what_is_ready_goes_before_what_the_look_ahead_waits_for() -> None:
    # Two messages each. Job 1 is full 6 s after job 0; 0 bytes, so that a round takes 1 s of latency.
    jobs = [Job(ready_s, (0.0, 2.0, 0.0), (Message(0, 1),) * 2) for ready_s in (4.0, 10.0)]
    # Ready: job 0 turns at 4, 5-7, 8; job 1 at 10, 11-13, 14.
    assert step(*jobs) == Step(24.0, 4.0, (0, 0, 0, 1, 1, 1))
    # Look-ahead 4: job 0's second turn (place 4) is after the first of job 1 (place 1), which comes at 10:
    # turns 0 at 4, 1 at 10, 0 at 10-12, 1 at 12-14, 0 (back at 13) at 14, 1 at 15.
    assert step(*jobs, order=4) == Step(25.0, 5.0, (0, 1, 0, 1, 0, 1))
    # Look-ahead 1: places 0 (0, 0), 1 (1, 0), 1 (0, 1), 2 (1, 1), 2 (0, 2), 3: the same order here.
    assert step(*jobs, order=1).order == (0, 1, 0, 1, 0, 1)
    # Look-ahead 0: places 0 of all rounds of job 0, then those of job 1.
    assert step(*jobs, order=0) == step(*jobs)


def test_a_look_ahead_orders_turns_by_job_and_round() -> None:
    jobs = [Job(10.0, (0.0,) * 3, (Message(0, 1),) * 2) for _ in range(4)]
    # Keys (job + 2 round, round): (0,0) (1,0) (2,0) (2,1)=job 0, (3,0) (3,1)=job 1, (4,1)=job 2, (4,2)=job 0, ...
    assert step(*jobs, order=2).order == (0, 1, 2, 0, 3, 1, 2, 0, 3, 1, 2, 3)


def test_a_fixed_order_waits_although_another_turn_could_be_played() -> None:
    jobs = (one(0.0, 500), one(9.0, 100))
    assert step(*jobs, order=(0, 0, 1, 1)) == Step(21.0, 1.0, (0, 0, 1, 1))
    # Job 1 is waited for until 9, and back at 11; only then job 0 may start: bytes 11-16, back at 17.
    assert step(*jobs, order=[1, 1, 0, 0]) == Step(27.0, 7.0, (1, 1, 0, 0))


@pytest.mark.parametrize("stolen", [0.0, 0.5, 1.0])
def test_encoding_during_the_backward_pass_delays_it(stolen: float) -> None:
    # 3 s of encoding within the backward pass, bytes and decoding hidden: the delay is all.
    assert step(one(1.0, 100, turns=(2.0, 1.0)), stolen=stolen) == Step(20.0 + 3.0 * stolen, 0.0, (0, 0))


def test_encoding_after_the_backward_pass_delays_nothing() -> None:
    jobs = (one(10.0, 100, turns=(2.0, 1.0)),)
    assert step(*jobs, stolen=1.0) == step(*jobs, stolen=0.0) == Step(25.0, 5.0, (0, 0))


def test_encoding_across_the_end_of_the_backward_pass_delays_it_by_the_part_before() -> None:
    # 8 s after the start, 2 s are left, and 5 s of encoding: both at half speed for 4 s, then 3 s alone (15).
    # Bytes and latency until 17, decoding until 18; the backward pass ended at 12.
    assert step(one(8.0, 100, turns=(5.0, 1.0)), stolen=1.0) == Step(28.0, 6.0, (0, 0))
    # Half a core: 2 s of encoding take 3 s, 3 s alone: 14, 16, 17; the backward pass ended at 11.
    assert step(one(8.0, 100, turns=(5.0, 1.0)), stolen=0.5) == Step(27.0, 6.0, (0, 0))


def test_a_delay_moves_later_buckets_and_not_earlier_ones() -> None:
    # Job 0 encodes 1 CPU second from 2 to 4, which moves the end from 10 to 11 and the bucket of job 1 from 6 to 7.
    # Job 1: encodes 7-9 (end 12), bytes 9-15, latency 16. Job 0's bytes were 4-5, back at 6.
    jobs = (one(2.0, 100, turns=(1.0, 0.0)), one(6.0, 600, turns=(1.0, 0.0)))
    assert step(*jobs, stolen=1.0) == Step(26.0, 4.0, (0, 0, 1, 1))
    # The bucket that was full while the thread was busy is taken as soon as the thread is free.
    jobs = (one(2.0, 100, turns=(3.0, 0.0)), one(3.0, 100, turns=(1.0, 0.0)))
    # 2-8 of job 0, 8-10 of job 1 (end 14): bytes 10-11, back at 12: hidden.
    assert step(*jobs, stolen=1.0) == Step(24.0, 0.0, (0, 1, 0, 1))


def random_jobs(rng: random.Random, count: int) -> list[Any]:
    def job(ready_s: float) -> Any:
        messages = tuple(Message(rng.randrange(1, 200), rng.choice((1, 7, 62))) for _ in range(rng.randrange(4)))
        return Job(ready_s, tuple(rng.random() / 4 for _ in range(len(messages) + 1)), messages)

    return [job(10.0 * (i + 1) / count) for i in range(count)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stolen", [0.0, 1.0])
def test_the_order_that_was_played_replays_to_the_same_step(seed: int, stolen: float) -> None:
    rng = random.Random(seed)
    jobs, at_once = random_jobs(rng, 12), rng.choice((1, 2, 8))
    for order in ("ready", 1, 4):
        first = step(*jobs, stolen=stolen, at_once=at_once, order=order)
        assert step(*jobs, stolen=stolen, at_once=at_once, order=first.order) == first


@pytest.mark.parametrize("seed", range(4))
def test_a_step_lies_between_its_floors_and_everything_end_to_end(seed: int) -> None:
    jobs = random_jobs(random.Random(seed), 12)
    sent_s = sum(m.nbytes / 100.0 for job in jobs for m in job.messages)
    latencies_s = sum(m.hops * 1.0 for job in jobs for m in job.messages)
    cpu_s = sum(sum(job.turns) for job in jobs)
    for order in ("ready", 2, 4):
        found = step(*jobs, stolen=1.0, order=order)
        assert max(jobs[0].ready_s + sent_s, cpu_s) <= found.step_s - 10.0 <= 10.0 + 2 * cpu_s + sent_s + latencies_s
        assert [found.order.count(i) for i in range(12)] == [len(job.turns) for job in jobs]


def test_hundreds_of_buckets_keep_the_wire_busy() -> None:
    # All full at the end: the wire sends without a gap, and the last latency is alone.
    jobs = [Job(10.0, (0.0,) * 4, simulator.ring(16, 4) * 3) for _ in range(500)]
    found = step(*jobs, links={"all": Link(0.001, 100.0)}, at_once=8)
    assert found.exposed_s == pytest.approx(500 * 3 * 0.24, abs=0.01)


def test_patterns_send_what_their_formulas_say() -> None:
    assert simulator.ring(1000, 4) == (Message(1500, 6),)
    assert simulator.ring(1001, 3, wire="between") == (Message(1335, 4, "between"),)
    assert simulator.gather(1000, 4) == (Message(3000, 3),)
    assert simulator.shuffle(1000, 4) == (Message(750, 1),)
    assert simulator.star(1000, 4) == (Message(3000, 1),) * 2
    rounds = {2: 1, 3: 3, 4: 2, 5: 4, 6: 4, 7: 4, 8: 3, 9: 5}
    assert {n: simulator.tree(1000, n) for n in rounds} == {n: (Message(1000, 1),) * k for n, k in rounds.items()}


def test_patterns_of_one_rank_send_nothing() -> None:
    patterns = (simulator.ring, simulator.gather, simulator.shuffle, simulator.tree, simulator.star)
    for messages in (pattern(1000, 1) for pattern in patterns):
        assert all(m == Message(0, 0) for m in messages)


@pytest.mark.parametrize(
    ("jobs", "changed", "said"),
    [
        ([Job(1.0, (0.0,), (Message(1, 1),))], {}, "wanted 2 turns"),
        ([one(1.0, 1, wire="moon")], {}, "on a wire of"),
        ([one(1.0, 1, 0)], {}, "hops for the bytes"),
        ([one(-1.0, 1)], {}, "seconds from 0"),
        ([one(1.0, 1)], {"backward_s": 21.0}, "backward_s <= compute_s"),
        ([one(1.0, 1)], {"stolen": 1.5}, "stolen <= 1"),
        ([one(1.0, 1)], {"at_once": 0}, "at_once from 1"),
        ([one(1.0, 1)], {"links": {"all": Link(0.0, 0.0)}}, "a rate above 0"),
        ([one(1.0, 1)], {"order": (0,)}, "each job once per turn"),
        ([one(1.0, 1)], {"order": (0, 0, 1)}, "each job once per turn"),
        ([one(1.0, 1)], {"order": "last"}, "each job once per turn"),
        ([one(1.0, 1)], {"order": -1}, "a look-ahead from 0"),
    ],
)
def test_a_step_that_does_not_fit_together_is_refused(jobs: list[Any], changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step(*jobs, **changed)


def drawn(seed: int) -> tuple[StepMeasurements, list[Option], list[Any]]:
    """A step of up to 60 buckets on `LINKS`, as the chooser knows it and as the simulator does."""
    rng = random.Random(seed)
    count, size, cpu_s = rng.randint(1, 60), 10 ** rng.uniform(0, 3), 10 ** rng.uniform(-3, 0)
    rounds, hops = rng.randint(1, 4), rng.choice((1, 2, 6, 30, 126))
    buckets, options, jobs = list[BucketMeasurements](), list[Option](), list[Any]()
    for b in range(count):
        ready_s = 10.0 * (b + 1) / count
        turns = tuple(cpu_s * rng.random() for _ in range(rounds + 1))
        sent = [int(1 + size * rng.random()) for _ in range(rounds)]
        options.append(Option(turns, tuple(PricedMessage(n / 100.0, 1.0, hops=hops) for n in sent), sum(sent), 0.0))
        buckets.append(BucketMeasurements((f"w{b}",), 1, ready_s, 0.0, (options[-1],)))
        jobs.append(Job(ready_s, turns, tuple(Message(n, hops) for n in sent)))
    facts = StepMeasurements(tuple(buckets), compute_s=20.0, backward_s=10.0, stolen=rng.choice((0.0, 0.5, 1.0)))
    return facts, options, jobs


@pytest.mark.parametrize("seed", range(40))
def test_the_forecast_of_a_step_is_what_the_simulator_finds(seed: int) -> None:
    """In the order that was planned; and in no other does the simulator find a step that is much shorter."""
    facts, options, jobs = drawn(seed)
    found = schedule(facts, options)
    planned = step(*jobs, stolen=facts.stolen, order=found.turns)
    assert found.step_s == pytest.approx(planned.step_s, rel=0.01)
    assert found.step_s <= 1.03 * step(*jobs, stolen=facts.stolen, order="ready").step_s
