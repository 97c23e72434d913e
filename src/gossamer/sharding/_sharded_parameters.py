"""Sharded parameters: every rank keeps its own rows, and all rows only while a unit of the model runs (ZeRO stage 3).

A resharded parameter keeps its shape but is backed by a single NaN. Code that reads it all the same makes a step that
all ranks reject. Autograd keeps views of the buffer a unit is unsharded into; the memory under them is freed and
allocated again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import ExchangeState, Outcome, sent_at
from gossamer.comm.message import Rounds as Method
from gossamer.sharding._access_trace import tensors_of
from gossamer.sharding._gather_updates import collected
from gossamer.sharding._reduce_scatter import most, unpacked
from gossamer.sharding._row_partition import RowPart, RowPartition, RowRange
from gossamer.sharding._unshard_order import LEVEL, UnshardOrder, UnshardUnit, window


@dataclass(slots=True)
class ShardedParameters:
    """The sharded parameters of one rank. Forward and backward start all-gathers, in the same order on all ranks.

    The all-gathers run on a communication thread of their own, `pump`.
    """

    module: nn.Module
    pump: CommThread
    always: _UnshardedUnit
    units: tuple[_UnshardedUnit, ...]
    rows: Mapping[str, RowRange]  # of this rank, by parameter
    exposed_s: float = 0.0  # seconds waited since it was last set to 0
    _running: list[int] = field(default_factory=list)
    _real: list[tuple[nn.Module, Callable[..., Any] | None]] = field(default_factory=list)

    @staticmethod
    def of(
        module: nn.Module, walk: UnshardOrder, pump: CommThread, *, deal: RowPartition, rank: int
    ) -> ShardedParameters:
        """Shard the parameters of `module`: keep the rows of `rank` in the partition `deal`, free all others."""
        params = dict(module.named_parameters())
        always, *units = (_UnshardedUnit.of(unit, params, deal, rank) for unit in (walk.always, *walk.units))
        rows = {name: deal.rows(name, p.shape, rank) for name, p in params.items()}
        found = ShardedParameters(module, pump, always, tuple(units), rows)
        for index, unit in enumerate(walk.units):
            found._wrap(module.get_submodule(unit.name), functools.partial(found._unit, index))
        found._wrap(module, found._whole)
        return found

    def _wrap(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._real.append((module, vars(module).get("forward")))
        module.forward = WrappedForward(module.forward, run)  # type: ignore[method-assign]

    def own(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's rows of every parameter by name, without parameters of which it has none."""
        for unit in (self.always, *self.units):
            yield from unit.own.items()

    def _whole(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.always.begin(self.pump)
        if self.units:
            self._look(0, is_forward=True)
        self._wait(self.always)
        return real(*args, **kwargs)

    def _unit(self, index: int, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_forward = torch._C._current_graph_task_id() == -1  # else backward computes it once more
        given = {id(one): one.grad_fn for one in tensors_of((args, kwargs))}
        self._enter(index, is_forward=is_forward)
        self._running.append(index)
        try:
            output = real(*args, **kwargs)
        finally:
            self._running.pop()
        if torch.is_grad_enabled():
            for one in tensors_of(output):  # but for what it was given and returns as it was
                if one.grad_fn is not None and given.get(id(one)) is not one.grad_fn:
                    for node in entry_nodes(one):
                        node.register_prehook(functools.partial(self._before_backward, index))
        return output

    def _before_backward(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        self._enter(index, is_forward=False)

    def _enter(self, index: int, *, is_forward: bool) -> None:
        self._look(index, is_forward=is_forward)
        self._wait(self.units[index])

    def _look(self, index: int, *, is_forward: bool) -> None:
        """Move the window: reshard units that are behind it, start to unshard those inside it."""
        wanted = window(index, len(self.units), is_forward=is_forward)
        for i, unit in enumerate(self.units):
            if i not in wanted and i not in self._running:
                unit.release()
        for i in wanted:
            self.units[i].begin(self.pump)

    def _wait(self, unit: _UnshardedUnit) -> None:
        began = time.perf_counter()
        unit.wait()
        self.exposed_s += time.perf_counter() - began

    def release(self) -> None:
        """Reshard all parameters: free all rows that are not this rank's own."""
        for unit in (self.always, *self.units):
            unit.release()

    def leave(self) -> None:
        """Unshard all parameters for good and restore the module's forwards.

        All ranks must call it; afterwards this object is unusable.
        """
        for unit in (self.always, *self.units):
            unit.begin(self.pump)
            unit.wait()
            unit.leave()
        while self._real:
            module, before = self._real.pop()
            if before is None:
                del module.forward
            else:
                module.forward = before  # type: ignore[method-assign]


def entry_nodes(output: Tensor) -> Iterator[Node]:
    """Yield the autograd nodes by which backward enters a unit.

    Changing a view in place afterwards drops the view's node, but keeps that of its base.
    """
    for one in (output, output._base):
        if one is not None and one.grad_fn is not None:
            yield one.grad_fn


class WrappedForward:
    """A forward wrapped by `run`."""

    def __init__(self, real: Callable[..., Any], run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, real, updated=())
        self.real, self.run = real, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.real, *args, **kwargs)


def hollow(param: Tensor) -> Tensor:
    """Return a tensor in place of a parameter that is not there: of its shape, backed by a single NaN."""
    nothing = float("nan") if param.is_floating_point() or param.is_complex() else 0
    return torch.full((), nothing, dtype=param.dtype, device=param.device).expand(param.shape)


@dataclass(slots=True)
class _UnshardedUnit:
    """A unit's parameters: the `own` rows always, all rows between `begin` and `release`."""

    params: Mapping[str, Tensor]
    own: dict[str, Tensor]
    buffers: tuple[_Buffer, ...]
    views: dict[str, Tensor]
    under_way: CommStep | None = None
    is_there: bool = False

    @staticmethod
    def of(unit: UnshardUnit, params: Mapping[str, Tensor], deal: RowPartition, rank: int) -> _UnshardedUnit:
        found = _UnshardedUnit({name: params[name] for name in sorted(unit.names)}, {}, (), {})
        for layout in unit.layouts:
            buffer = _Buffer.of(layout, deal, rank)
            found.buffers += (buffer,)
            found.own |= buffer.rows(params)
            found.views |= dict(buffer.whole.slices())
        found._hollow()
        return found

    def begin(self, pump: CommThread) -> None:
        """Start to gather the unit, unless it is unsharded or pending."""
        if self.is_there or self.under_way is not None or not self.buffers:
            return
        self.under_way = pump.begin([1] * len(self.buffers))
        for job, buffer in enumerate(self.buffers):
            self.under_way.submit(job, buffer.gather())

    def wait(self) -> None:
        """Wait until the unit is unsharded. Raise PeerLost."""
        if self.under_way is None:
            return
        for job in range(len(self.buffers)):
            self.under_way.result(job)
        self.under_way, self.is_there = None, True
        for name, view in self.views.items():
            self.params[name].data = view

    def release(self) -> None:
        """Reshard the unit."""
        self.wait()
        if self.is_there:
            self._hollow()

    def _hollow(self) -> None:
        self.is_there = False
        for param in self.params.values():
            param.data = hollow(param)
        for buffer in self.buffers:
            buffer.free()

    def leave(self) -> None:
        for name, view in self.views.items():
            self.params[name].data = view.clone()
        for buffer in self.buffers:
            buffer.free()


@dataclass(slots=True)
class _Buffer:
    """A unit's parameters of one type: the message that this rank sends, and the buffer they are gathered into."""

    deal: RowPartition
    rank: int
    message: Tensor  # (most,) this rank's rows, zero-padded; (0,) where it sends none
    parts: tuple[RowPart, ...]  # of the givers
    whole: Bucket

    @staticmethod
    def of(layout: Layout, deal: RowPartition, rank: int) -> _Buffer:
        givers = deal.givers(rank)
        parts = tuple(deal.part(layout, giver) for giver in givers)
        message = torch.zeros(most(parts) if rank in givers else 0, dtype=layout.dtype, device=layout.device)
        return _Buffer(deal, rank, message, parts, layout.allocate())

    def rows(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows, moved into the message, as views of it."""
        found, done = {}, 0
        for e in self.whole.layout.entries:
            rows = self.deal.rows(e.name, e.shape, self.rank)
            if rows.count:
                given = rows.of(params[e.name].detach())
                found[e.name] = self.message[done : done + given.numel()].view(given.shape)
                found[e.name].copy_(given)
                done += prod(given.shape)
        return found

    def gather(self) -> Method:
        return sent_at(self._gather(), lambda level: LEVEL)

    def _gather(self) -> Method:
        storage = self.whole.flat.untyped_storage()
        storage.resize_(self.whole.layout.nbytes)
        rows = yield from collected(self.deal, self.rank, self.message, most(self.parts))
        for row, part in zip(rows, self.parts, strict=True):
            unpacked(row, part, self.whole.flat)
        return Outcome(self.whole.flat, None, ExchangeState())

    def free(self) -> None:
        self.whole.flat.untyped_storage().resize_(0)
