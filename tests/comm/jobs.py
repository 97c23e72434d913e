"""What pool workers run for the tests of this folder."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch

from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, ProcessGroups
from gossamer.spec.errors import PeerLost
from pool import Seat


def group(seat: Seat, *, timeout_s: float = 20.0, **more: Any) -> ProcessGroupChannel:
    levels = ProcessGroups.flat(seat.ranks)
    return ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=timeout_s, **more))


def combine_all(seat: Seat) -> dict[str, list]:
    """One message of every kind; replies and metered bytes."""
    channel = group(seat)
    mine = torch.arange(6.0).view(seat.ranks, -1) * 10**seat.rank if 6 % seat.ranks == 0 else torch.ones(seat.ranks, 2)
    found = {}
    for how in Collective:
        part = mine.int() if how is Collective.OR else mine.clone()
        (got,) = channel.start(Message((part,), how)).wait()
        found[how.value] = got.tolist()
    found["bytes"] = channel.meter.snapshot()
    channel.close()
    return found


def two_rounds(value: float):
    """A job whose two rounds have one size, so that a wrong pairing would be silent."""
    (a,) = yield Message((torch.full((1000,), value),), Collective.SUM)
    (b,) = yield Message((torch.full((1000,), value * 100),), Collective.SUM)
    return Outcome(a, b, ExchangeState())


def submit_all(step: CommStep, jobs: list[int]) -> None:
    for job in jobs:
        step.submit(job, two_rounds(job + 1.0))


def random_arrival(seat: Seat, *, jobs: int, look_ahead: int, threads: int = 3) -> list[int]:
    """Jobs arrive in another order on every rank, from several threads; the numbers of those with wrong results."""
    channel = group(seat)
    pump = CommThread(channel, look_ahead=look_ahead)
    wrong = []
    for turn in range(3):
        step = pump.begin([2] * jobs)
        arriving = list(range(jobs))
        random.Random(seat.rank * 100 + turn).shuffle(arriving)
        senders = [
            threading.Thread(target=submit_all, args=(step, part))
            for part in (arriving[i::threads] for i in range(threads))
        ]
        for sender in senders:
            sender.start()
        for job in range(jobs):
            outcome = step.result(job)
            total = seat.ranks * (job + 1.0)
            if not bool((outcome.mean == total).all() and (outcome.lost == 100 * total).all()):
                wrong.append(job)
        for sender in senders:
            sender.join()
    pump.close()
    channel.close()
    return wrong


def lost_peer(seat: Seat, *, asks: bool = False) -> dict[str, str]:
    """Rank 1 never sends: the others' jobs fail, the channel is poisoned, nothing hangs.

    asks: they ask each other who is lost, as where no supervisor finds out.
    """
    channel, store = group(seat, timeout_s=3.0, asks=asks), seat.store()
    store.set(f"joined/{seat.rank}", "")
    store.wait([f"joined/{rank}" for rank in range(seat.ranks)])  # a peer that leaves earlier was never met
    pump = CommThread(channel)
    step = pump.begin([1, 1])
    said = {}
    if seat.rank != 1:
        buffer = torch.ones(10)
        step.submit(0, _one(buffer))
        step.submit(1, _one(torch.ones(10)))
        for job in (0, 1):
            try:
                step.result(job)
            except PeerLost as error:
                said[str(job)] = str(error)
        try:
            channel.start(Message((buffer,), Collective.SUM))
        except PeerLost as error:
            said["after"] = str(error)
    pump.close()
    channel.close()
    return said


def _one(buffer: torch.Tensor):
    (a,) = yield Message((buffer,), Collective.SUM)
    return Outcome(a, None, ExchangeState())


def probe_links(seat: Seat) -> dict:
    """What the probe finds between the pool's workers."""
    from gossamer.comm.link_probe import probe

    channel = group(seat)
    links = probe(channel)
    channel.close()
    return links.model_dump(mode="json")
