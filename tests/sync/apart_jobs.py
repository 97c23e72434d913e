"""What pool workers run to look inside islands that train apart: a few steps of SGD on quadratics of their own."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from gossamer import exchange as exchange_methods
from gossamer import sync
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.sync import (
    GradientReducer,
    LocalStep,
    LocalStepSchedule,
    StatusExchange,
    StepContext,
    StepVote,
    outer_loop_of,
)
from pool import Seat
from sync.held_up_clock import HeldUpClock

RATE = 0.1
SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (40, 7), "b.bias": (3,)}


def start() -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    seed = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=seed) for name, shape in SHAPES.items()}


def gradient(name: str, value: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Of a quadratic whose minimum is another one on every rank, with noise that depends on the step."""
    seed = torch.Generator().manual_seed(1000 * rank + 10 * step + len(name))
    center = torch.randn(value.shape, generator=torch.Generator().manual_seed(100 + rank + len(name)))
    return value - center + 0.1 * torch.randn(value.shape, generator=seed)


def rounds(seat: Seat, **given: Any) -> dict[str, Any]:
    """What `_rounds` returns, by a clock that calls nobody late but who is held up."""
    clock = HeldUpClock(dist.PrefixStore("late", seat.store()))
    with clock.in_force():
        return _rounds(seat, clock, **given)


def _rounds(
    seat: Seat,
    clock: HeldUpClock,
    *,
    written: Any,
    steps: int,
    islands: list[list[int]] | None = None,
    samples: list[float] | None = None,
    poison: list[int] | None = None,
    late: list[int] | None = None,
    finish: bool = True,
    bucket_bytes: int = 1 << 20,
) -> dict[str, Any]:
    """Where this rank and the anchor are after every step; what it sent; `poison`: [rank, step] whose parameters are
    not finite afterwards; `late`: [rank, step, until] that is held up in a step until the next rank has made so many,
    which waits there until it has come as far; or [..., for], and for so many seconds more, and nobody waits, and
    `left_behind` says whether the next rank has made one more meanwhile.
    """
    torch.set_num_threads(1)
    levels = ProcessGroups.islands(islands or [[r] for r in range(seat.ranks)]).twice()
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=20.0))
    pump, beside = CommThread(channel), CommThread(channel)
    params = {name: p.requires_grad_() for name, p in start().items()}
    method = sync.build(written)
    meets = "all" if method.loop is None else "island"
    replica = GradientReducer(params, exchange_methods.build("dense"), pump, bucket_bytes=bucket_bytes, meets=meets)
    truth = {name: p.detach() for name, p in params.items()}
    apart = outer_loop_of(
        method.loop,
        params,
        truth,
        replica,
        beside,
        units=("a", "b"),
        bucket_bytes=bucket_bytes,
        second_moments=lambda names: {name: truth[name].square() for name in names},
    )
    weight = samples[seat.rank] if samples else 1.0
    at, anchors, sent, idle, heard = [], [], [], [], []
    left_behind: bool | None = None  # of a rank that was held up
    together = method.loop
    pace = together.pace(levels.groups["island"]) if together is not None else LocalStepSchedule()
    apart.begin(0, steps if finish else 10 * steps, 0)
    signals = clock.signals
    for step in range(steps):
        before = channel.meter.total_bytes
        last = finish and step == steps - 1
        signals.set(f"{seat.rank} made {step}", "")
        if apart.roll is not None:
            heard += [[one.step, list(one.late)] for one in apart.roll.after(step, 0)]
        if not pace.makes(seat.rank, step) or apart.is_late(step):
            idle.append(step)
            apart.after(LocalStep(step + 1, 0.0, 0.0, 0, last=last, made=False))
            sent.append(channel.meter.total_bytes - before)
            at.append(flat(truth))
            anchors.append(flat(apart.common()))
            continue
        if late and late[:2] == [seat.rank, step]:
            others = f"{(seat.rank + 1) % seat.ranks} made"
            with clock.held_up():
                signals.wait([f"{others} {late[2]}"])
                time.sleep(late[3] if len(late) > 3 else 0)
            left_behind = signals.check([f"{others} {late[2] + 1}"])
        if late and len(late) == 3 and [(late[0] + 1) % seat.ranks, late[2]] == [seat.rank, step]:
            signals.wait([f"{late[0]} made {step}"])
        replica.open(StepContext(step, 0, 1.0, weight, level=method.level(step)))
        replica.watch()
        loss = sum((p * gradient(n, p.detach(), seat.rank, step)).sum() for n, p in params.items())
        loss.backward()
        replica.reduce()
        assert replica.agree(StepVote(0.0)).finite
        replica.commit()
        with torch.no_grad():
            for name, mean in replica.gradients().items():
                params[name].sub_(mean, alpha=RATE)
        if poison == [seat.rank, step]:
            with torch.no_grad():
                params["a.bias"].fill_(float("nan"))
        apart.after(LocalStep(step + 1, RATE, weight, 0, last=last))
        if method.loop is not None:
            apart.settle(step + 1)  # so that what is under way is counted where it was sent
        sent.append(channel.meter.total_bytes - before)
        at.append(flat(truth))
        anchors.append(flat(apart.common()) if method.loop else [])
    factor = apart.factor
    apart.close()
    replica.close()
    for one in (pump, beside):
        one.close()
    channel.close()
    return {
        "at": at,
        "anchor": anchors,
        "sent": sent,
        "factor": factor,
        "idle": idle,
        "heard": heard,
        "left_behind": left_behind,
    }


def words(seat: Seat, *, steps: int, asked: list[int], start: int = 0) -> list[list[Any]]:
    """What this rank hears, and after which step; `asked`: [rank, step] that is asked to stop. It ends when all do."""
    levels = ProcessGroups.islands([[r] for r in range(seat.ranks)]).twice()
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=20.0))
    word, found = StatusExchange.of(channel, start), []
    assert word is not None
    for done in range(start + 1, steps + 1):
        time.sleep(0.01 * seat.rank)
        word.note(float(seat.rank), 2.0, committed=True)
        ask = int(asked[0] == seat.rank and done >= asked[1])
        heard = word.after(done, ask, last=done == steps)
        found += [[done, one.step, one.ask, list(one.losses), list(one.weights)] for one in heard]
        if any(one.ask for one in heard):
            break
    channel.close()
    return found


def alone(seat: Seat) -> bool:
    """Whether there is no word where there is one island."""
    channel = ProcessGroupChannel(
        Rendezvous(seat.store(), seat.rank, ProcessGroups.islands([[0]]).twice(), interface="lo", timeout_s=20.0)
    )
    found = StatusExchange.of(channel, 0) is None
    channel.close()
    return found


def flat(tensors: dict[str, torch.Tensor]) -> list[float]:
    """All numbers, by name."""
    return [x for _, t in sorted(tensors.items()) for x in t.flatten().tolist()]
