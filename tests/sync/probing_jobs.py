"""What pool workers run to look at steps that losses alone decide."""

from __future__ import annotations

from typing import Any

import torch

from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.sync import GradientReducer, StepContext, StepMessage, ZerothOrderConfig, ZerothOrderRank
from pool import Seat

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (40, 70), "scale": ()}
RATE = 0.02


def start(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The same on all ranks; one of them is not contiguous."""
    seed = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=seed).to(dtype) for name, shape in SHAPES.items()}
    found["b.weight"] = found["b.weight"].t()
    return found


def loss_of(params: dict[str, torch.Tensor], *, center: int = 0) -> torch.Tensor:
    """Smooth, not quadratic, of float64 where they are."""
    total = torch.zeros((), dtype=torch.float64)
    for number, value in enumerate(params.values()):
        seed = torch.Generator().manual_seed(100 + 10 * center + number)
        total = total + torch.log(torch.cosh(value.double() - torch.randn(value.shape, generator=seed))).sum()
    return total / 50


def steps(
    seat: Seat,
    *,
    count: int,
    samples: int = 1,
    labels: list[float] | None = None,
    alike: bool = True,
    dtype: str = "float32",
    clip: float = 0.0,
    poison: list[int] | None = None,
) -> dict[str, Any]:
    """Where the parameters are after every step, what was sent, what was said, and where a joiner comes from `start`.
    `alike`: all ranks have the same loss; `poison`: [rank, step] whose loss is not finite.
    """
    torch.set_num_threads(1)
    channel = ProcessGroupChannel(
        Rendezvous(seat.store(), seat.rank, ProcessGroups.flat(seat.ranks), interface="lo", timeout_s=20.0)
    )
    pump = CommThread(channel)
    replica = GradientReducer({}, {}, pump, bucket_bytes=1 << 20)
    params = start(getattr(torch, dtype))
    truth = {n: p if p.dtype == torch.float32 else p.float() for n, p in params.items()}
    probing = ZerothOrderRank(ZerothOrderConfig(directions=samples, epsilon=1e-2), params, truth, replica, 7)
    at, sent, said, finite, norms, losses, back = [], [], [], [], [], [], True
    for step in range(count):
        replica.begin(StepContext(step, 7, 1.0, labels[seat.rank] if labels else 1.0))
        before = {n: p.clone() for n, p in params.items()}

        def loss(step: int = step) -> float:
            found = float(loss_of(params, center=0 if alike else seat.rank))
            return found * (float("nan") if poison == [seat.rank, step] else 1.0)

        vote = probing.look(step, loss)
        back = back and all(torch.equal(p, before[n]) for n, p in params.items())
        agreement = replica.agree(vote)
        finite.append([agreement.finite, *agreement.bad_ranks])
        if agreement.finite:
            codes = bytes(agreement.beside.flatten().tolist())
            heard = StepMessage(step=step, rate=RATE, clip=clip, labels=tuple(replica.weights().tolist()), codes=codes)
            probing.take(heard)
            said.append(heard.line())
        norms.append(agreement.norm)
        losses.append(agreement.loss)
        sent.append(sum(replica.sent_bytes().values()))
        at.append(flat(params))
    pump.close()
    channel.close()
    return {
        "at": at,
        "sent": sent,
        "said": said,
        "finite": finite,
        "norms": norms,
        "losses": losses,
        "back": back,
        "follows": all(torch.equal(params[n], t.to(params[n].dtype)) for n, t in truth.items()),
    }


def flat(tensors: dict[str, torch.Tensor]) -> list[float]:
    """All numbers."""
    return [x for t in tensors.values() for x in t.flatten().tolist()]
