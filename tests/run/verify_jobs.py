"""What pool workers run with a fault in one of them, patched into the worker: the code itself knows nothing of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gossamer.memory import States
from gossamer.run.batches import Feed
from gossamer.run.beacon import Beacon
from gossamer.run.witness import Witness
from gossamer.sync import Replica
from pool import Seat
from run.jobs import train

SECTIONS = {"train": {"verify": {"every": 1}}}


def flipped(tensor: Tensor) -> None:
    """The lowest bit of one number is another."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[len(bits) // 2] ^= 1


def faults(at: int) -> dict[str, tuple[type, str, Callable[..., Any]]]:
    """By name: what is patched, and with what; `at`: the step in which it happens."""
    update, send, fetch, redo = States.update, Replica._send, Feed.fetch, Witness.redo

    def skips(self: States, grads: Any, *, lr_scale: float, step: int) -> None:
        if step != at:
            update(self, grads, lr_scale=lr_scale, step=step)

    def rate(self: States, grads: Any, *, lr_scale: float, step: int) -> None:
        update(self, grads, lr_scale=lr_scale * (1.01 if step == at else 1.0), step=step)

    def bit(self: States, grads: Any, *, lr_scale: float, step: int) -> None:
        update(self, grads, lr_scale=lr_scale, step=step)
        if step == at:
            flipped(max(self.params.values(), key=Tensor.numel))

    def moment(self: States, grads: Any, *, lr_scale: float, step: int) -> None:
        update(self, grads, lr_scale=lr_scale, step=step)
        if step == at:
            flipped(max((tensor for _, _, _, tensor in self.slots()), key=Tensor.numel))

    def label(self: Feed, step: int) -> Any:
        pieces = fetch(self, step)
        if step == at and self.replica == 1:  # its own data: another's it reads as they are
            labels = next(iter(pieces.values())).rows["labels"]
            place = tuple(torch.nonzero(labels != -100)[-1])
            labels[place] = (labels[place] + 1) % 16
        return pieces

    def idle(self: Replica, index: int) -> None:
        if self._window.step == at:
            self._slots[index].bucket.flat.zero_()
        send(self, index)

    def secretly(self: Replica, index: int) -> None:
        copy = Tensor.clone

        def clone(flat: Tensor) -> Tensor:
            kept = copy(flat)
            flat.mul_(1.5)
            return kept

        with patch.object(Tensor, "clone", clone):
            send(self, index)

    def judges(self: Witness, step: int, replica: int, seed: int, **how: Any) -> Tensor:
        row = redo(self, step, replica, seed, **how)
        return row * 1.001 if step == at and seed > 1 else row

    def measures(self: Witness, step: int, replica: int, seed: int, **how: Any) -> Tensor:
        row = redo(self, step, replica, seed, **how)
        return row + torch.rand(len(row), dtype=row.dtype) if seed == 0 else row

    def breaks(self: Beacon, word: bytes, tell: Any = Beacon._all_tell) -> Any:
        return tell(self, bytes(18) if len(self._chain) == 1024 - 2 else word)

    return {
        "skips": (States, "update", skips),
        "rate": (States, "update", rate),
        "bit": (States, "update", bit),
        "moment": (States, "update", moment),
        "label": (Feed, "fetch", label),
        "idle": (Replica, "_send", idle),
        "secretly": (Replica, "_send", secretly),
        "judges": (Witness, "redo", judges),
        "measures": (Witness, "redo", measures),
        "breaks": (Beacon, "_all_tell", breaks),
    }


@contextmanager
def faulty(name: str, at: int) -> Iterator[None]:
    with patch.object(*faults(at)[name]):
        yield


def run(
    seat: Seat, *, fault: str = "", who: int = 1, at: int = 2, threads: bool = False, **given: Any
) -> dict[str, Any]:
    """A run in which rank `who` has a fault. `threads`: every rank computes on a number of threads of its own."""
    with ExitStack() as stack:
        if fault and seat.rank == who:
            stack.enter_context(faulty(fault, at))
        if threads:
            drawn, redo = random.Random(seat.rank), Witness.redo
            torch.set_num_threads(1 + seat.rank % 4)

            def anyhow(self: Witness, *args: Any, **how: Any) -> Tensor:
                return redo(self, *args, **{"threads": drawn.randint(1, 4), **how})

            stack.enter_context(patch.object(Witness, "redo", anyhow))
            stack.callback(torch.set_num_threads, 1)
        return train(seat, **{"sections": SECTIONS, **given})
