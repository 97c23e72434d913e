"""What pool workers run with a fault in one of them, patched into the worker: the code itself knows nothing of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gossamer import exchange as exchange_methods
from gossamer import loss
from gossamer import optimizer as optimizer_methods
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.run.batches import DatasetBatches, Feed
from gossamer.run.engine import engine_of
from gossamer.run.majority_vote import distance
from gossamer.run.parts import Parts
from gossamer.run.random_beacon import RandomBeacon
from gossamer.run.reexecution import Reexecution
from gossamer.run.verify import Verifier
from gossamer.sharding import RowPartition, ShardedOptimizer, holdings, shapes_of
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.sync import GradientReducer
from pool import Seat
from run.jobs import train

SECTIONS = {"train": {"verify": {"every": 1}}}


def flipped(tensor: Tensor) -> None:
    """The lowest bit of one number is another."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[len(bits) // 2] ^= 1


def faults(at: int) -> dict[str, tuple[type, str, Callable[..., Any]]]:
    """By name: what is patched, and with what; `at`: the step in which it happens."""
    update, send, fetch, redo, check = (
        ShardedOptimizer.update,
        GradientReducer._send,
        Feed.fetch,
        Reexecution.redo,
        Verifier.check,
    )

    def skips(self: ShardedOptimizer, grads: Any, *, lr_scale: float, step: int, apart: bool) -> None:
        if step != at:
            update(self, grads, lr_scale=lr_scale, step=step, apart=apart)

    def rate(self: ShardedOptimizer, grads: Any, *, lr_scale: float, step: int, apart: bool) -> None:
        update(self, grads, lr_scale=lr_scale * (1.01 if step == at else 1.0), step=step, apart=apart)

    def bit(self: ShardedOptimizer, grads: Any, *, lr_scale: float, step: int, apart: bool) -> None:
        update(self, grads, lr_scale=lr_scale, step=step, apart=apart)
        if step == at:
            flipped(max(self.params.values(), key=Tensor.numel))

    def moment(self: ShardedOptimizer, grads: Any, *, lr_scale: float, step: int, apart: bool) -> None:
        update(self, grads, lr_scale=lr_scale, step=step, apart=apart)
        if step == at:
            flipped(max((tensor for _, _, _, tensor in self.slots()), key=Tensor.numel))

    def label(self: Feed, step: int) -> Any:
        pieces = fetch(self, step)
        if step == at and self.replica == 1:  # its own data: another's it reads as they are
            labels = next(iter(pieces.values())).rows["labels"]
            place = tuple(torch.nonzero(labels != -100)[-1])
            labels[place] = (labels[place] + 1) % 16
        return pieces

    def idle(self: GradientReducer, index: int) -> None:
        if self._window.step == at:
            self._slots[index].bucket.flat.zero_()
        send(self, index)

    def secretly(self: GradientReducer, index: int) -> None:
        copy = Tensor.clone

        def clone(flat: Tensor) -> Tensor:
            kept = copy(flat)
            flat.mul_(1.5)
            return kept

        with patch.object(Tensor, "clone", clone):
            send(self, index)

    def judges(self: Reexecution, step: int, replica: int, seed: int, **how: Any) -> Tensor:
        row = redo(self, step, replica, seed, **how)
        return row * 1.001 if step == at and seed > 1 else row

    def measures(self: Reexecution, step: int, replica: int, seed: int, **how: Any) -> Tensor:
        row = redo(self, step, replica, seed, **how)
        return row + torch.rand(len(row), dtype=row.dtype) if seed == 0 else row

    def jitters(self: Reexecution, step: int, replica: int, seed: int, **how: Any) -> Tensor:
        row = redo(self, step, replica, seed, **how)
        row[3:] *= 1 + 4e-5 * torch.rand(len(row) - 3, dtype=row.dtype)
        return row

    def frozen(self: Verifier, step: int, *args: Any, **how: Any) -> None:
        check(self, step, *args, **how)
        if step == at:
            with torch.no_grad():
                next(p for p in self.witness.engine.module.parameters() if not p.requires_grad).add_(1.0)

    def breaks(self: RandomBeacon, word: bytes, tell: Any = RandomBeacon._all_tell) -> Any:
        return tell(self, bytes(18) if len(self._chain) == 1024 - 2 else word)

    return {
        "skips": (ShardedOptimizer, "update", skips),
        "rate": (ShardedOptimizer, "update", rate),
        "bit": (ShardedOptimizer, "update", bit),
        "moment": (ShardedOptimizer, "update", moment),
        "label": (Feed, "fetch", label),
        "idle": (GradientReducer, "_send", idle),
        "secretly": (GradientReducer, "_send", secretly),
        "judges": (Reexecution, "redo", judges),
        "measures": (Reexecution, "redo", measures),
        "jitters": (Reexecution, "redo", jitters),
        "frozen": (Verifier, "check", frozen),
        "breaks": (RandomBeacon, "_all_tell", breaks),
    }


@contextmanager
def faulty(name: str, at: int) -> Iterator[None]:
    with patch.object(*faults(at)[name]):
        yield


class Broad(nn.Module):
    """Sums over more numbers than one thread takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 64), nn.LayerNorm(64)
        self.inside, self.outside = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.outside(torch.tanh(self.inside(self.norm(x))))
        return x @ self.embed.weight.T


class Lines(Dataset):
    """Long sequences."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 16, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def reruns(seat: Seat, *, count: int) -> dict[str, Any]:
    """How far honest reruns on 1 to 4 threads are from the first, and one with a wrong label; and what is let pass."""
    torch.manual_seed(0)
    data, module = DatasetBatches(Lines()), Broad()
    config = RunConfig.model_validate({"train": {"verify": {"every": 1}}})
    plan = Plan(mesh=MeshSizes(replica=3), batch_fractions=(1 / 3,) * 3, rows=(16,) * 3, microbatches=(2,) * 3)
    parts = Parts(
        module=module,
        objective=loss.build("next_token"),
        train=data,
        validation={},
        config=config,
        plan=plan,
        device=torch.device("cpu"),
    )
    witness = Reexecution(engine_of(parts), Feed(data, plan, 0, 0), dict(module.named_parameters()))
    pump = CommThread(
        ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, ProcessGroups.flat(1), interface="lo", timeout_s=20.0))
    )
    replica = GradientReducer(witness.params, exchange_methods.build("dense"), pump, bucket_bytes=1 << 20)
    deal = RowPartition(ProcessGroups.flat(1))
    held = holdings(deal, shapes_of(witness.params), 0)
    states = ShardedOptimizer.of(
        optimizer_methods.build("sgd"), witness.params, deal, rank=0, holdings=held, differences=None
    )
    verifier = Verifier(
        wanted=config.train.verify, witness=witness, replica=replica, states=states, sink=lambda record: None
    )
    verifier.begin(0)
    drawn = random.Random(0)
    first, *others = [witness.redo(1, 1, 7, threads=drawn.randint(1, 4)) for _ in range(count)]
    with faulty("label", 1):
        wrong = witness.redo(1, 1, 7)
    replica.close()
    pump.close()
    pump.channel.close()
    honest = [distance(first, other) for other in others]
    return {"honest": honest, "wrong": distance(first, wrong), "tolerance": verifier.tolerance}


def run(
    seat: Seat, *, fault: str = "", who: int = 1, at: int = 2, threads: bool = False, **given: Any
) -> dict[str, Any]:
    """A run in which rank `who` has a fault. `threads`: every rank computes on a number of threads of its own."""
    with ExitStack() as stack:
        if fault and seat.rank == who:
            stack.enter_context(faulty(fault, at))
        if threads:
            drawn, redo = random.Random(seat.rank), Reexecution.redo
            torch.set_num_threads(1 + seat.rank % 4)

            def anyhow(self: Reexecution, *args: Any, **how: Any) -> Tensor:
                return redo(self, *args, **{"threads": drawn.randint(1, 4), **how})

            stack.enter_context(patch.object(Reexecution, "redo", anyhow))
            stack.callback(torch.set_num_threads, 1)
        return train(seat, **{"sections": SECTIONS, **given})
