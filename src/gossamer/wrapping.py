"""`gossamer.wrap`: one's own loop, distributed with at most four changed lines.

    model, optimizer, loader = gossamer.wrap(model, optimizer, loader)      # 1: the only new line
    for batch in loader:                                                    # this rank's rows of every batch
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()                                                    # exchanges, agrees, clips, updates
        optimizer.zero_grad()

Every rank runs the same script (torchrun, srun, mpirun, or `gossamer lab run`); alone it is the same with one rank.
The gradient is that of one process with the whole batch: ranks count by their valid labels.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer import sync
from gossamer.data import share_rows, valid_labels
from gossamer.job import Where
from gossamer.ops.norm import scale_
from gossamer.plan.law import check_loop
from gossamer.run.batches import Batch, row_count
from gossamer.run.checkpoint import trainable
from gossamer.run.launch.environment import launcher_of, read_environment
from gossamer.spec.choice import Exchanges
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import BUCKET_BYTES
from gossamer.sync import Vote, Window
from gossamer.wire.channel.group import Group, Meeting
from gossamer.wire.message import Combine, Levels, Message
from gossamer.wire.pump import Pump
from gossamer.worker import place_to_meet

Weigh = Callable[[Batch], float]
_log = logging.getLogger(__name__)


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Batch],
    *,
    exchange: Exchanges = "dense",
    share: list[float] | None = None,
    clip: float = 0.0,
    accumulate: int = 1,
    weight: Weigh | None = None,
    timeout_s: float = 120.0,
) -> tuple[nn.Module, WrappedOptimizer, WrappedLoader]:
    """The same model, an optimizer whose step is a transaction of all ranks, a loader that gives this rank its rows.

    share: part of every batch per rank (default equal). clip: largest global gradient norm, 0 for none. weight: what
    a batch counts (default: its valid labels after the shift, or its rows where it has no labels). accumulate: batches
    whose gradients add up before each `optimizer.step()`; it says which backward is a step's last.
    """
    params = trainable(model)
    exchanges = check_loop(exchange=exchange, clip=clip).by_name(params)
    alone = not launcher_of(os.environ)
    where = Where(store=dist.HashStore()) if alone else place_to_meet(read_environment(), timeout_s)
    ranks = where.ranks
    parts = tuple(share) if share else (1.0 / ranks,) * ranks
    if len(parts) != ranks:
        raise BadInput(f"share: wanted {ranks} parts, one per rank, got {len(parts)}")
    meeting = Meeting(
        store=where.store,
        rank=where.rank,
        levels=Levels.flat(ranks),
        interface=where.interface,
        timeout_s=timeout_s,
        backend="nccl" if next(model.parameters()).is_cuda else "gloo",
        generation=where.generation,
    )
    pump = Pump(Group(meeting))
    _share_first(params, pump)  # as users of DDP expect
    replica = sync.Replica(params, exchanges, pump, bucket_bytes=BUCKET_BYTES)
    weigh = weight or _weight
    wrapped_loader = WrappedLoader(loader, replica, parts, weigh, accumulate)
    wrapped_optimizer = WrappedOptimizer(optimizer, replica, clip)
    weakref.finalize(wrapped_optimizer, _close, pump)
    return model, wrapped_optimizer, wrapped_loader


class WrappedLoader:
    """Gives this rank its rows of every batch. All ranks must iterate loaders that yield the same batches."""

    def __init__(
        self, loader: Iterable[Batch], replica: sync.Replica, share: tuple[float, ...], weigh: Weigh, accumulate: int
    ) -> None:
        self._loader, self._replica, self._share, self._weigh = loader, replica, share, weigh
        self._accumulate = accumulate
        self.steps = 0

    def __iter__(self) -> Iterator[Batch]:
        """Batches in groups of `accumulate`: the group's weight opens the step, its last backward sends it."""
        group: list[Batch] = []
        for batch in self._loader:
            group.append(self._rows(batch))
            if len(group) == self._accumulate:
                yield from self._step(group)
                group = []
        if group:
            yield from self._step(group)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _step(self, group: list[Batch]) -> Iterator[Batch]:
        weight = sum(self._weigh(batch) for batch in group)
        self._replica.open(Window(self.steps, 0, 1.0, weight))
        self.steps += 1
        for index, batch in enumerate(group):
            if index == len(group) - 1:
                self._replica.watch()
            yield batch

    def _rows(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping) or not all(isinstance(v, Tensor) for v in batch.values()):
            raise BadInput(f"the loader yields {type(batch).__name__}: wanted dictionaries of tensors")
        rows = share_rows(row_count(batch), self._share)
        first = sum(rows[: self._replica.rank])
        return {name: value[first : first + rows[self._replica.rank]] for name, value in batch.items()}


class WrappedOptimizer:
    """`step` waits for the exchange, lets all ranks agree, clips, and only then updates: on all ranks, or on none."""

    def __init__(self, inner: torch.optim.Optimizer, replica: sync.Replica, clip: float) -> None:
        self.inner, self._replica, self._clip = inner, replica, clip
        self.rejected = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own, so that learning-rate schedulers go on working."""
        return self.inner.param_groups

    def step(self) -> bool:
        """One transaction; False when the ranks rejected it because a gradient was not finite."""
        self._replica.reduce()
        agreement = self._replica.agree(Vote(loss=0.0))
        if not agreement.finite:
            self._replica.reject()
            self.rejected += 1
            _log.warning("a gradient of rank %s is not finite: no rank updates", agreement.bad_ranks)
            return False
        if self._clip and agreement.norm > self._clip:
            scale_(self._replica.flats(), self._clip / (agreement.norm + 1e-6))
        self._replica.commit()
        self.inner.step()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: the next step starts from zeros."""

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def _weight(batch: Batch) -> float:
    labels = batch.get("labels")
    if labels is None or labels.dim() < 2:
        return float(row_count(batch))
    return float(valid_labels(labels))


def _share_first(params: Mapping[str, Tensor], pump: Pump) -> None:
    """Give all ranks rank 0's parameters."""
    for param in params.values():
        flat = param.detach().reshape(-1).clone() if pump.channel.rank == 0 else torch.zeros_like(param).reshape(-1)
        (mine,) = pump.channel.start(Message((flat,), Combine.SUM)).wait()
        param.detach().copy_(mine.view_as(param))


def _close(pump: Pump) -> None:
    pump.close()
    pump.channel.close()
