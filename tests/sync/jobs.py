"""What pool workers run for the tests of this folder."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from comm.jobs import group
from gossamer import exchange as exchange_methods
from gossamer import sharding as sharding_methods
from gossamer.comm.bucket import Layout
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.sync import GradientReducer, StepContext, StepVote
from pool import Seat


class Branchy(nn.Module):
    """Tied weights, a parameter nobody uses, a frozen one, and one used in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.frozen(self.mix(self.embed(ids)).tanh())
        return self.head(self.sometimes(x).tanh() if odd else x)


def params_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in module.named_parameters() if p.requires_grad}


def rows_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six sequences of five tokens and their labels, some of them void."""
    seed = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (6, 5), generator=seed)
    labels = torch.where(torch.rand(6, 5, generator=seed) < 0.4, -100, torch.roll(ids, -1, 1))
    return ids, labels


def mean_loss(module: Branchy, ids: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
    return nn.functional.cross_entropy(module(ids, step % 2 == 1).flatten(0, 1), labels.flatten())


def gradients(
    seat: Seat, *, rows: list[int], steps: int, bucket_bytes: int, exchange: Any = "dense", planned: bool = False
) -> list[dict[str, list[float]]]:
    """The mean gradients of several steps with `rows[rank]` of the six sequences on every rank.

    `planned`: in buckets of two parameters each, but for the last one, which no bucket names, and the last bucket first
    in every round of messages.
    """
    torch.manual_seed(0)
    module = Branchy()
    channel = group(seat)
    pump = CommThread(channel)
    params, method = params_of(module), exchange_methods.build(exchange)
    names = list(params)[:-1]
    buckets = [names[at : at + 2] for at in range(0, len(names), 2)] if planned else []
    turns = len(method.traffic(Layout.of(params), channel.levels, seat.rank)) + 1
    order = [job for _ in range(turns) for job in range(len(buckets), -1, -1)] if planned else []
    replica = GradientReducer(params, method, pump, bucket_bytes=bucket_bytes, buckets=buckets, turns=order)
    first = sum(rows[: seat.rank])
    found = []
    for step in range(steps):
        ids, labels = (t[first : first + rows[seat.rank]] for t in rows_of(step))
        replica.open(StepContext(step, 0, 1.0, float((labels != -100).sum())))
        if planned:
            assert len(replica.layouts) == len(buckets) + 1
            assert [job for job, _ in replica._exchanging.order(pump._look_ahead)] == order
        replica.watch()
        loss = mean_loss(module, ids, labels, step)
        loss.backward()
        replica.reduce()
        agreement = replica.agree(StepVote(float(loss)))
        assert agreement.finite
        found.append(
            {n: g.flatten().tolist() for n, g in replica.gradients().items()}
            | {"loss": [agreement.loss], "norm": [agreement.norm]}
        )
        replica.commit()
    replica.close()
    pump.close()
    channel.close()
    return found


def mixed(seat: Seat, *, scale: float) -> dict[str, list]:
    """Two steps with two exchanges, one of them with feedback; gradients multiplied with `scale` before backward."""
    torch.manual_seed(0)
    module = Branchy()
    channel = group(seat)
    pump = CommThread(channel)
    params = params_of(module)
    lossy = exchange_methods.build({"error_feedback": {"topk": {"fraction": 0.2}}})
    exchanges = {n: lossy if p.dim() > 1 else exchange_methods.build("dense") for n, p in params.items()}
    replica = GradientReducer(params, exchanges, pump, bucket_bytes=1 << 20)
    found: dict[str, list] = {}
    for step in range(2):
        ids, labels = rows_of(step)
        replica.open(StepContext(step, 0, 1.0, float((labels != -100).sum()), scale))
        replica.watch()
        (mean_loss(module, ids, labels, step) * scale).backward()
        replica.reduce()
        agreement = replica.agree(StepVote(0.0))
        found |= {f"{step}/{n}": g.flatten().tolist() for n, g in replica.gradients().items()}
        found[f"{step}/norm"] = [agreement.norm]
        (replica.commit if agreement.finite else replica.reject)()
    saved = {n: t.clone() for n, t in replica.states().items()}
    found["states"] = sorted(saved)
    found["residual"] = [float(sum(t.abs().sum() for t in saved.values()))]
    replica.restore({n: t + 1 for n, t in saved.items()})
    found["restored"] = [bool(all(torch.equal(t, saved[n] + 1) for n, t in replica.states().items()))]
    replica.close()
    pump.close()
    channel.close()
    return found


def poisoned(gradient: torch.Tensor) -> torch.Tensor:
    """One entry is not a number."""
    gradient = gradient.clone()
    gradient.view(-1)[0] = float("nan")
    return gradient


def hidden(seat: Seat) -> list[bool]:
    """A gradient of rank 1 with one entry that is not a number, through random_k; then a sound step."""
    torch.manual_seed(0)
    module = Branchy()
    channel = group(seat)
    pump = CommThread(channel)
    sparse = exchange_methods.build({"error_feedback": {"random_k": {"fraction": 0.02}}})
    replica = GradientReducer(params_of(module), sparse, pump, bucket_bytes=1 << 20)
    verdicts = []
    for step in range(2):
        ids, labels = rows_of(step)
        replica.open(StepContext(step, 0, 1.0, float((labels != -100).sum())))
        replica.watch()
        bad = module.mix.weight.register_hook(lambda g, s=step: poisoned(g) if s == 0 and seat.rank == 1 else g)
        mean_loss(module, ids, labels, step).backward()
        bad.remove()
        replica.reduce()
        agreement = replica.agree(StepVote(0.0))
        verdicts.append(agreement.finite)
        (replica.commit if agreement.finite else replica.reject)()
        if not agreement.finite:
            verdicts.append(all(not bool(t.any()) for t in replica.states().values()))
    replica.close()
    pump.close()
    channel.close()
    return verdicts


def votes(seat: Seat, *, poison: int, where: str) -> list[dict]:
    """Rank `poison` has a nan in its loss or gradient: what every rank then knows."""
    torch.manual_seed(0)
    module = Branchy()
    channel = group(seat)
    pump = CommThread(channel)
    replica = GradientReducer(params_of(module), exchange_methods.build("dense"), pump, bucket_bytes=1 << 20)
    found = []
    for step in range(2):
        ids, labels = rows_of(step)
        replica.open(StepContext(step, 0, 1.0, float((labels != -100).sum())))
        loss = mean_loss(module, ids, labels, step)
        if step == 0 and seat.rank == poison:
            if where == "loss":
                loss = loss * float("nan")
            else:
                module.mix.weight.register_hook(lambda g: g * float("inf"))
        replica.watch()
        loss.backward()
        replica.reduce()
        verdict = replica.agree(StepVote(float(loss), ask=seat.rank))
        found.append({"finite": verdict.finite, "bad": list(verdict.bad_ranks), "ask": verdict.ask})
        (replica.commit if verdict.finite else replica.reject)()
        if step == 0:
            module.mix.weight._backward_hooks = None
    replica.close()
    pump.close()
    channel.close()
    return found


def late_vote(seat: Seat, *, late_s: float) -> list[float]:
    """Rank 1 votes `late_s` later than it has its mean: what every rank waited, for the vote and for all else."""
    module = Branchy()
    channel = group(seat)
    pump = CommThread(channel)
    replica = GradientReducer(params_of(module), exchange_methods.build("dense"), pump, bucket_bytes=1 << 20)
    replica.timing.begin()
    replica.open(StepContext(0, 0, 1.0, 1.0))
    replica.reduce()
    reduced_s = replica.timing.exposed_s
    time.sleep(late_s * seat.rank)
    replica.agree(StepVote(0.0))
    found = [reduced_s, replica.timing.exposed_s, replica.timing.agreed_s, replica.timing.exchanged_s]
    replica.timing.begin()
    found += [replica.timing.exposed_s, replica.timing.agreed_s]
    pump.close()
    channel.close()
    return found


def out_of_step(seat: Seat) -> str:
    """Rank 1 believes to be one step further."""
    module = Branchy()
    channel = group(seat)
    pump = CommThread(channel)
    replica = GradientReducer(params_of(module), exchange_methods.build("dense"), pump, bucket_bytes=1 << 20)
    replica.open(StepContext(3 + seat.rank, 0, 1.0, 1.0))
    replica.reduce()
    try:
        replica.agree(StepVote(0.0))
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    pump.close()
    channel.close()
    return said


def by_rows(seat: Seat, *, rows: list[int], steps: int) -> dict[str, list]:
    """What each rank owns of the mean gradients of two micro-batches, through a coder with feedback: with buckets that
    stay and with buckets that are given back.
    """
    fed_back = exchange_methods.build({"error_feedback": {"two_shot": {"codec": "int8"}}})
    method = sharding_methods.build("zero2").exchange(fed_back, ["all"])
    found: dict[str, list] = {}
    channel = group(seat)
    pump = CommThread(channel)
    first = sum(rows[: seat.rank])
    for gives_back in (False, True):
        torch.manual_seed(0)
        module = Branchy()
        mine = held_by(seat, module)
        replica = GradientReducer(
            params_of(module), method, pump, bucket_bytes=64, holdings=mine, gives_back=gives_back
        )
        for step in range(steps):
            ids, labels = (t[first : first + rows[seat.rank]] for t in rows_of(step))
            replica.open(StepContext(step, 0, 1.0, float((labels != -100).sum())))
            mean_loss(module, ids, labels, step).backward()
            replica.watch()
            mean_loss(module, ids, labels, step).backward()
            replica.reduce()
            norm = replica.agree(StepVote(0.0)).norm
            means = {n: g.flatten().tolist() for n, g in replica.gradients().items()}
            found.setdefault(str(gives_back), []).append({**means, "norm": norm})
            replica.commit()
        replica.close()
    pump.close()
    channel.close()
    return found


def held_by(seat: Seat, module: nn.Module) -> dict[str, sharding_methods.Holding]:
    """What this rank holds where rows are dealt to all ranks."""
    deal = sharding_methods.build("zero2").deal(ProcessGroups.flat(seat.ranks))
    return sharding_methods.holdings(deal, sharding_methods.shapes_of(params_of(module)), seat.rank)


def under_way(seat: Seat, *, look_ahead: int) -> tuple[int, int]:
    """Of so many buckets that are given back, how many were there at most before their exchange had ended."""
    module, most = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), 0
    channel = group(seat)
    pump = CommThread(channel, look_ahead=look_ahead)
    params = dict(module.named_parameters())
    dense = sharding_methods.build("zero2").exchange(exchange_methods.build("dense"), ["all"])
    replica = GradientReducer(params, dense, pump, bucket_bytes=64, holdings=held_by(seat, module), gives_back=True)

    def count(_: torch.Tensor) -> None:
        nonlocal most
        done = sum(future.done() for future in replica._exchanging.futures)
        most = max(most, sum(slot.bucket is not None or slot.sent for slot in replica._slots) - done)

    for param in params.values():
        param.register_post_accumulate_grad_hook(count)
    for step in range(2):
        replica.open(StepContext(step, 0, 1.0, 1.0))
        replica.watch()
        module(torch.ones(2, 8)).sum().backward()
        replica.reduce()
        assert replica.agree(StepVote(0.0)).finite
        replica.commit()
    replica.close()
    pump.close()
    channel.close()
    return len(replica.layouts), most
