"""A small pipeline and a shuffle of rows, for the tests of transfers: over gloo in the pool, or in threads."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.comm.channel import Channel, carry
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import codec as codecs
from gossamer.p2p import RowAllToAll, StageLink, TensorRoute, TensorSpec
from gossamer.p2p import activation as crossings
from gossamer.spec.errors import PeerLost
from pool import Seat

WIDTH, TOKENS, BATCHES, SEED = 48, 10, 5, 3


def group(seat: Seat, *, timeout_s: float = 20.0) -> ProcessGroupChannel:
    levels = ProcessGroups.flat(seat.ranks)
    return ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=timeout_s))


def stage(index: int, dtype: torch.dtype) -> nn.Module:
    """The same on every call; its own generator, since ranks may be threads of one process."""
    rng = torch.Generator().manual_seed(100 + index)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * WIDTH**-0.5 + (p.dim() == 1))
    return module.to(dtype)


def batch_of(index: int, dtype: torch.dtype) -> Tensor:
    """Batches differ in length, so that forms differ from micro-batch to micro-batch."""
    rng = torch.Generator().manual_seed(index)
    return torch.randn(2, TOKENS + index, WIDTH, generator=rng).to(dtype)


def loss_of(y: Tensor) -> Tensor:
    return (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sigmoid().mean() / BATCHES


def links_of(ranks: int, crossing: Any) -> list[StageLink]:
    one = crossings.build(crossing)
    return [StageLink(source=r, target=r + 1, levels=ProcessGroups.flat(ranks), crossing=one) for r in range(ranks - 1)]


def passages(link: StageLink, dtype: torch.dtype) -> list[TensorRoute]:
    return [link.passage(TensorSpec.of(batch_of(b, dtype)), (SEED, 0, b)) for b in range(BATCHES)]


def one_f_one_b(rank: int, ranks: int) -> Iterator[tuple[str, int]]:
    """The actions of a stage, sends and receives included."""
    warm = min(ranks - rank - 1, BATCHES)
    order = [("F", b) for b in range(warm)]
    for b in range(BATCHES - warm):
        order += [("F", b + warm), ("B", b)]
    order += [("B", b) for b in range(BATCHES - warm, BATCHES)]
    for op, b in order:
        comes, goes = (rank > 0, rank < ranks - 1) if op == "F" else (rank < ranks - 1, rank > 0)
        yield from [(f"RECV_{op}", b)] * comes + [(op, b)] + [(f"SEND_{op}", b)] * goes


def play(rank: int, channel: Channel, *, crossing: Any, dtype: str = "float32") -> dict[str, Any]:
    """One step of a stage: its gradients, its loss, and the bytes it sent, metered and priced."""
    kind, ranks = getattr(torch, dtype), len(channel.levels.group("all", rank))
    links, module = links_of(ranks, crossing), stage(rank, kind)
    before = passages(links[rank - 1], kind) if rank > 0 else []
    after = passages(links[rank], kind) if rank < ranks - 1 else []
    actions = list(one_f_one_b(rank, ranks))
    number = {a: j for j, a in enumerate(a for a in actions if "_" in a[0])}
    pump = CommThread(channel)
    transfers = pump.transfers(len(number))
    for b, passage in enumerate(before):
        transfers.submit(number["RECV_F", b], passage.receive())
    for b, passage in enumerate(after):
        transfers.submit(number["RECV_B", b], passage.receive_gradient())
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    total = 0.0
    for op, b in actions:
        if op == "RECV_F":
            inputs[b] = transfers.result(number[op, b]).mean
        elif op == "F":
            x = inputs.setdefault(b, batch_of(b, kind))
            outputs[b] = module(x.view_as(x))
            if rank == ranks - 1:
                outputs[b] = loss_of(outputs[b])
                total += outputs[b].item()
        elif op == "SEND_F":
            transfers.submit(number[op, b], after[b].send(outputs[b]))
        elif op == "RECV_B":
            outputs[b].backward(transfers.result(number[op, b]).mean)
        elif op == "B" and rank == ranks - 1:
            outputs[b].backward()
        elif op == "SEND_B":
            transfers.submit(number[op, b], before[b].send_gradient(inputs.pop(b).grad))
    transfers.finish()
    pump.close()
    there = sum(links[rank].traffic(p.form, rank).nbytes for p in after)
    back = sum(links[rank - 1].traffic(p.form, rank, back=True).nbytes for p in before)
    priced = {f"{rank}>{rank + 1}": there} if after else {}
    priced |= {f"{rank}>{rank - 1}": back} if before else {}
    gradients = [p.grad.flatten().tolist() for p in module.parameters() if p.grad is not None]
    return {"gradients": gradients, "loss": total, "sent": channel.meter.snapshot(), "priced": priced}


def uncut(ranks: int, *, crossing: Any, dtype: str = "float32") -> list[dict[str, Any]]:
    """The same model in one piece, with what the links do to its activations."""
    kind = getattr(torch, dtype)
    modules = [stage(r, kind) for r in range(ranks)]
    ways = [passages(link, kind) for link in links_of(ranks, crossing)]
    total = 0.0
    for b in range(BATCHES):
        x = modules[0](batch_of(b, kind))
        for module, way in zip(modules[1:], ways, strict=True):
            x = module(way[b].through(x))
        loss = loss_of(x)
        loss.backward()
        total += loss.item()
    losses = [0.0] * (ranks - 1) + [total]
    return [
        {"gradients": [p.grad.flatten().tolist() for p in m.parameters() if p.grad is not None], "loss": loss}
        for m, loss in zip(modules, losses, strict=True)
    ]


def pipeline(seat: Seat, *, crossing: Any, dtype: str = "float32") -> dict[str, Any]:
    channel = group(seat)
    found = play(seat.rank, channel, crossing=crossing, dtype=dtype)
    channel.close()
    return found


# ---- rows


def rows_of(rank: int, ranks: int, case: str, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """The rows of a rank, sorted by target, and how many go where."""
    splits = [(3 * rank + 5 * peer) % 7 for peer in range(ranks)]
    if case == "sparse":  # only neighbors share rows, and the last rank gets none
        splits = [4 * (peer == (rank + 1) % ranks and peer != ranks - 1) for peer in range(ranks)]
    if case == "none":
        splits = [0] * ranks
    x = torch.randn(sum(splits), 6, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)
    if case == "strided":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert x.is_contiguous() is False
    return x, splits


def weigh(y: Tensor, rank: int) -> Tensor:
    """A loss of what arrived, different for every place."""
    return (y.float().square() * torch.linspace(0.5, 2, y.numel()).view(y.shape)).sum() * (rank + 1)


def wire_of(rank: int, levels: ProcessGroups, codec: Any) -> RowAllToAll:
    return RowAllToAll(rank=rank, levels=levels, codec=None if codec is None else codecs.build(codec))


def shuffle(rank: int, channel: Channel, *, case: str, codec: Any = None, dtype: str = "float32") -> dict[str, Any]:
    """There, a loss on what arrived, and back; everything as lists."""
    ranks = len(channel.levels.group("all", rank))
    x, splits = rows_of(rank, ranks, case, getattr(torch, dtype))
    x.requires_grad_()
    wire, run = wire_of(rank, channel.levels, codec), partial(carry, channel)
    split = wire.agree(splits, run)
    counted = channel.meter.total_bytes
    there = wire(x, split, at=(SEED, 0, 0), carry=run)
    home = wire(there * 2, split.back, at=(SEED, 0, 1), carry=run)
    (weigh(there, rank) + weigh(home, rank)).backward()
    assert x.grad is not None
    row = TensorSpec(tuple(x.shape[1:]), x.dtype)
    priced = [wire.traffic(row, s, back=b) for s in (split, split.back) for b in (False, True)]
    per_peer = [sum(t.splits[p] for t in priced if t.splits) for p in range(ranks) if p != rank]
    return {
        "there": there.tolist(),
        "home": home.tolist(),
        "gradient": x.grad.tolist(),
        "arriving": split.arriving,
        "sent": channel.meter.total_bytes - counted,
        "priced": sum(per_peer),
    }


def rows(seat: Seat, **arguments: Any) -> dict[str, Any]:
    channel = group(seat)
    found = shuffle(seat.rank, channel, **arguments)
    channel.close()
    return found


# ---- many, and lost ones


def crowd(seat: Seat, *, jobs: int) -> list[int]:
    """Transfers both ways at once, submitted in another order on every rank and from several threads, all sends
    before any result; the numbers of those that came out wrong."""
    channel = group(seat)
    levels, peer = channel.levels, 1 - seat.rank
    there = StageLink(source=seat.rank, target=peer, levels=levels)
    here = StageLink(source=peer, target=seat.rank, levels=levels)
    pump, wrong = CommThread(channel), []
    form = TensorSpec((1000,), torch.float32)
    for turn in range(2):
        step, order = pump.transfers(2 * jobs), list(range(2 * jobs))
        random.Random(10 * seat.rank + turn).shuffle(order)

        def submit(some: list[int], step=step, turn=turn) -> None:
            for j in some:
                at = (SEED, turn, j // 2)
                if j % 2:
                    step.submit(j, here.passage(form, at).receive())
                else:
                    step.submit(j, there.passage(form, at).send(torch.full((1000,), 1000.0 * seat.rank + j)))

        threads = [threading.Thread(target=submit, args=(order[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        random.Random(turn).shuffle(order)
        for j in order:
            arrived = step.result(j).mean
            if j % 2 and not bool((arrived == 1000.0 * peer + j - 1).all()):
                wrong.append(j)
        for thread in threads:
            thread.join()
    pump.close()
    channel.close()
    return wrong


def lost_peer(seat: Seat, *, dies: bool) -> dict[str, str]:
    """Rank 1 goes away, or is there and silent: a send and a receive both say so, and so does all that follows."""
    channel, store = group(seat, timeout_s=1.5), seat.store()
    store.set(f"joined/{seat.rank}", "")
    store.wait([f"joined/{rank}" for rank in range(seat.ranks)])  # a peer that dies earlier was never met
    if seat.rank == 1:
        if dies:
            os._exit(7)
        threading.Event().wait(2)
        channel.close()
        return {}
    pump = CommThread(channel)
    step, said = pump.transfers(3), {}
    link = StageLink(source=0, target=1, levels=channel.levels)
    form = TensorSpec((300_000,), torch.float32)
    step.submit(0, link.passage(form, (SEED, 0, 0)).send(torch.ones(300_000)))
    step.submit(1, link.passage(form, (SEED, 0, 0)).receive_gradient())
    for job in (0, 1):
        try:
            step.result(job)
        except PeerLost as error:
            said[str(job)] = str(error)
    step.submit(2, link.passage(form, (SEED, 0, 1)).send(torch.ones(300_000)))
    try:
        step.finish()
    except PeerLost as error:
        said["finish"] = str(error)
    try:
        step.result(2)
    except PeerLost as error:
        said["2"] = str(error)
    said["bytes"] = str(channel.meter.total_bytes)
    pump.close()
    channel.close()
    return said
