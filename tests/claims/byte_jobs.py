"""What pool workers run for the claim of Just One Byte: a small network, trained on one text, is tuned to another."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from claims.apart_jobs import CONTEXT, Next, text
from gossamer import exchange as exchange_methods
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.sync import GradientReducer, StepContext, StepMessage, StepVote, ZerothOrderConfig, ZerothOrderRank
from pool import Seat

EPSILON, BATCH = 1e-3, 64


@cache
def english() -> Tensor:
    """Some 450 kB about Python that everybody has, as bytes."""
    return torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()


def loss_at(model: Next, of: Tensor, *key: int, count: int = BATCH) -> Tensor:
    """Mean over bytes at places drawn by `key`."""
    places = torch.randint(0, len(of) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(hash(key)))
    rows = of[places[:, None] + torch.arange(CONTEXT)]
    return nn.functional.cross_entropy(model(rows), of[places + CONTEXT])


@cache
def trained() -> dict[str, Tensor]:
    """400 ordinary steps on Python's own source."""
    torch.manual_seed(0)
    model = Next()
    rule = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(400):
        rule.param_groups[0]["lr"] = 1e-2 * (1 - step / 400)
        rule.zero_grad()
        loss_at(model, text(), 1, step, count=128).backward()
        rule.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def tune(seat: Seat, *, way: str, steps: int, rate: float) -> dict[str, Any]:
    """The last layer alone, on English. `way`: gradients, slopes as they are, or slopes in a byte. The loss on text
    that nobody has seen, before and after; bytes sent by this rank per step; whether a joiner arrives there too.
    """
    model = Next()
    model.load_state_dict(trained())
    params = {n: p for n, p in model.named_parameters() if n.startswith("last")}
    channel = ProcessGroupChannel(
        Rendezvous(seat.store(), seat.rank, ProcessGroups.flat(seat.ranks), interface="lo", timeout_s=20.0)
    )
    pump = CommThread(channel)
    by_gradients = way == "gradients"
    replica = GradientReducer(
        params if by_gradients else {}, exchange_methods.build("dense"), pump, bucket_bytes=1 << 20
    )
    truth = {n: p.detach() for n, p in params.items()}
    probing = ZerothOrderRank(ZerothOrderConfig(directions=1, epsilon=EPSILON), params, truth, replica, 0)
    before, said, sent = unseen(model), [], []
    for step in range(steps):
        window = StepContext(step, 0, 1.0, float(BATCH))
        lr = rate * (1 - step / steps)

        def loss(step: int = step) -> Tensor:
            return loss_at(model, english(), 2, step, seat.rank)

        if by_gradients:
            replica.open(window)
            replica.watch()
            torch.autograd.backward(loss(), inputs=list(params.values()))
            replica.reduce()
            assert replica.agree(StepVote(0.0)).finite
            replica.commit()
            with torch.no_grad():
                for name, mean in replica.gradients().items():
                    params[name].sub_(mean, alpha=lr)
        elif way == "byte":
            replica.begin(window)
            agreement = replica.agree(probing.look(step, lambda f=loss: float(f())))
            codes = bytes(agreement.beside.flatten().tolist())
            said.append(
                StepMessage(step=step, rate=lr, clip=0.0, labels=tuple(replica.weights().tolist()), codes=codes)
            )
            probing.take(said[-1])
        else:
            replica.begin(window)
            with torch.no_grad(), probing._put_back() as kept:
                two = [probing._shifted(step, seat.rank, side, kept, lambda f=loss: float(f())) for side in (1, -1)]
            slopes = replica.gather(((two[0] - two[1]) / (2 * EPSILON),)).flatten()
            probing.go(step, (-lr * slopes / seat.ranks).tolist())
        sent.append(sum(replica.sent_bytes().values()))
    at = {n: p.detach().clone() for n, p in params.items()}
    after = unseen(model)
    model.load_state_dict(trained())
    for heard in said:
        probing.take(heard)
    pump.close()
    channel.close()
    joins = all(torch.equal(at[n], p) for n, p in params.items())
    return {"before": before, "after": after, "sent": sent, "joins": joins}


@torch.no_grad()
def unseen(model: Next) -> float:
    return float(loss_at(model, english(), 3, count=8000))
