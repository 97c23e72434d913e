"""The pump: one order on all ranks, whatever arrives when."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommThread, needed, order, order_of_turns
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome
from gossamer.spec.errors import WireMismatch


def test_order_is_a_function_of_the_declared_rounds() -> None:
    assert order([1, 2], 1) == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]
    for rounds in ([], [1], [3, 1, 2], [1] * 64, [0, 2]):
        for look_ahead in (1, 3, 100):
            found = order(rounds, look_ahead)
            assert sorted(found) == [(j, r) for j, n in enumerate(rounds) for r in range(n + 1)]
            for job in range(len(rounds)):
                mine = [r for j, r in found if j == job]
                assert mine == sorted(mine)


def test_look_ahead_keeps_that_many_jobs_in_flight() -> None:
    under_way, most = set(), 0
    for job, r in order([1] * 20, 4):
        under_way.add(job) if r == 0 else under_way.discard(job)
        most = max(most, len(under_way))
    assert most == 5  # job 4 starts, then job 0 is waited for


def test_an_order_is_taken_only_where_it_has_the_turns_of_these_jobs() -> None:
    assert order_of_turns([1, 2], [0, 1, 1, 0, 1]) == [(0, 0), (1, 0), (1, 1), (0, 1), (1, 2)]
    for other in ([0, 1, 1, 0], [0, 1, 1, 1, 1], [0, 1, 2, 0, 1], [0, 0, 0, 1, 1], [0, 1, 1, 0, -1]):
        assert order_of_turns([1, 2], other) is None
    assert needed([1, 2], order_of_turns([1, 2], [0, 1, 1, 0, 1]) or []) == (2, 2)
    assert needed([1, 2], order_of_turns([1, 2], [0, 0, 1, 1, 1]) or []) == (1, 2)


def test_a_planned_order_is_the_order_of_the_messages() -> None:
    for turns in ([1, 0, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 0]):
        (channel,) = LocalChannel.world(1)
        seen = list[str]()
        pump = CommThread(channel, observe=lambda said, number, seen=seen: seen.append(said.partition("job ")[2]))
        step = pump.begin([1, 2], turns)
        for job, rounds in enumerate([1, 2]):
            step.submit(job, method(rounds))
        for job in range(2):
            step.result(job)
        pump.close()
        assert seen == [f"{job} round {r}" for job, r in order_of_turns([1, 2], turns) or () if r < [1, 2][job]]


@pytest.mark.parametrize("look_ahead", [1, 4])
def test_jobs_that_arrive_in_any_order_give_the_right_results(pool, look_ahead: int) -> None:
    assert pool.run("comm.jobs:random_arrival", 2, jobs=40, look_ahead=look_ahead) == [[], []]


def test_many_jobs_in_flight_do_not_lock_up(pool) -> None:
    assert pool.run("comm.jobs:random_arrival", 4, jobs=64, look_ahead=64) == [[]] * 4


def test_a_lost_peer_fails_every_job_and_poisons_the_channel(pool) -> None:
    said = pool.run("comm.jobs:lost_peer", 2)[0]
    assert "rank 0 lost a peer among ranks [0, 1]" in said["0"] and "is lost" not in said["0"]
    assert said["1"] == said["0"], "a job that waited behind must fail with the same cause"
    assert "the channel of rank 0 sends no more messages" in said["after"]


def test_without_a_supervisor_those_that_lost_a_peer_name_it(pool) -> None:
    first, _, third = pool.run("comm.jobs:lost_peer", 3, asks=True)
    assert all("; rank 1 is lost: no report of the same came" in said["0"] for said in (first, third))
    assert first["1"] == first["0"] and "the channel of rank 0 sends no more messages" in first["after"]


def method(rounds: int):
    for _ in range(rounds):
        yield Message((torch.ones(2),), Collective.SUM)
    return Outcome(torch.ones(2), None, ExchangeState())


def test_a_round_not_needed_sends_an_empty_message() -> None:
    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    step = pump.begin([3])
    step.submit(0, method(1))
    step.result(0)
    pump.close()
    assert channel.meter.messages == 3


def test_a_round_too_many_is_an_error_not_a_hang() -> None:
    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    step = pump.begin([1])
    step.submit(0, method(2))
    with pytest.raises(WireMismatch, match="declared 1 messages"):
        step.result(0)
    pump.close()


def test_whoever_hears_of_a_result_finds_the_replies_of_its_job_freed() -> None:
    """Otherwise memory after a step hangs on how fast this thread goes on after its last word."""
    replies, alive = list[weakref.ref[torch.Tensor]](), list[bool]()

    def reading():
        (reply,) = yield Message((torch.ones(4),), Collective.GATHER)
        replies.append(weakref.ref(reply))
        return Outcome(reply.sum(), None, ExchangeState())

    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    step = pump.begin([1])
    step.futures[0].add_done_callback(lambda _: alive.extend(one() is not None for one in replies))
    step.submit(0, reading())
    assert step.result(0).mean.item() == 4.0
    pump.close()
    assert alive == [False]


def test_an_error_inside_a_method_reaches_the_waiter() -> None:
    def broken():
        yield Message((torch.ones(1),), Collective.SUM)
        raise ZeroDivisionError("inside the method")

    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    step = pump.begin([1])
    step.submit(0, broken())
    with pytest.raises(ZeroDivisionError, match="inside the method"):
        step.result(0)
    pump.close()


def test_dropping_a_step_closes_its_methods_and_the_next_step_works() -> None:
    closed = []

    def watched():
        try:
            yield Message((torch.ones(1),), Collective.SUM)
        finally:
            closed.append(True)
        return Outcome(torch.ones(1), None, ExchangeState())

    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    step = pump.begin([1, 1])
    step.submit(0, watched())
    step.drop()
    with pytest.raises(Exception, match="aborted the communication of the step"):
        step.result(1)
    assert closed == [True]
    step = pump.begin([1])
    step.submit(0, method(1))
    assert step.result(0).lost is None
    pump.close()


def hand(value: float, to: int, ranks: int = 2):
    """A transfer: sends where `value` is given, else receives."""
    ends, nothing = tuple(int(r == to) for r in range(ranks)), (0,) * ranks
    if value:
        yield Message((torch.full((1, 4), value),), Collective.SHUFFLE, "all", ends, nothing)
        return Outcome(torch.empty(0), None, ExchangeState())
    (got,) = yield Message((torch.empty(0, 4),), Collective.SHUFFLE, "all", nothing, ends)
    return Outcome(got, None, ExchangeState())


def ping_pong(rank: int, channel: LocalChannel) -> list[float]:
    """Every message is made of the one before; both ranks send first and receive later whatever comes meanwhile."""
    pump, found = CommThread(channel), []
    step = pump.transfers(8)
    for job in (1, 3, 5, 7):
        step.submit(job, hand(0, 1 - rank))
    value = 1.0 + rank
    for job in (0, 2, 4, 6):
        step.submit(job, hand(value, 1 - rank))
        value = 2 * step.result(job + 1).mean[0, 0].item()
        found.append(value)
    step.finish()
    pump.close()
    return found


def test_transfers_may_wait_for_each_other() -> None:
    """As jobs of an ordinary step these would lock up: job 2 is not there before job 1 has ended."""
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(ping_pong, range(2), LocalChannel.world(2, patience_s=10.0)))
    assert found == [[4.0, 4.0, 16.0, 16.0], [2.0, 8.0, 8.0, 32.0]]


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_transfer_is_one_message(rounds: int) -> None:
    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    step = pump.transfers(2)
    step.submit(0, method(rounds))
    with pytest.raises(WireMismatch, match="no message to send" if rounds == 0 else "has another to send"):
        step.result(0)
    step.drop()
    with pytest.raises(
        Exception, match="no message to send" if rounds == 0 else "aborted the communication of the step"
    ):
        step.result(1)
    pump.close()


def test_closing_gives_up_transfers_that_never_came_and_closes_the_methods() -> None:
    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    step, late = pump.transfers(2), method(1)
    step.submit(1, late)
    pump.close()
    with pytest.raises(Exception, match="aborted the communication of the step"):
        step.finish()
    assert late.gi_frame is None
