"""The sharded optimizer of one rank: its optimizer states, its update, and the all-gather of updated rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gossamer.comm.bucket import Layout, as_float
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ExchangeState as Stateless
from gossamer.comm.message import Outcome, Rounds, Traffic
from gossamer.comm.random_key import key_at
from gossamer.exchange.codec import Codec
from gossamer.optimizer import LayerVectors, Optimizer, OptimizerState
from gossamer.sharding._gather_updates import collected, collecting, longest_message_numel
from gossamer.sharding._holding import Holding
from gossamer.sharding._reduce_scatter import most, packed, unpacked
from gossamer.sharding._row_partition import RowPartition, RowRange
from gossamer.sharding._sharded_parameters import ShardedParameters
from gossamer.sharding._tiered_states import TieredStates

_MAIN = "main"


@dataclass(slots=True)
class ShardedOptimizer:
    """The optimizer states of one rank, for its own rows of each parameter, and the all-gather of the rows it updates.

    `holdings`: what this rank holds, by parameter name; where it owns all rows there is nothing to gather. Rows sharded
    along two levels are gathered between islands first, then inside. `differences`: a codec for weight updates. The
    optimizer `rule` then updates float32 copies, the state `main`. The parameters are those that all ranks decode, on
    this rank too: so they are equal everywhere, and a compression error is part of the next difference. `shards`: the
    sharded parameters, where parameters are sharded too: after an update only their own rows are gathered, the others
    when a unit runs. `tiers`: the states in a file, where they are there; then `held` has none.
    """

    rule: Optimizer
    params: Mapping[str, Tensor]
    holdings: Mapping[str, Holding]
    deal: RowPartition
    rank: int
    differences: Codec | None
    held: OptimizerState
    shards: ShardedParameters | None = None
    tiers: TieredStates | None = None
    skipped: dict[str, int] = field(default_factory=dict)  # parameter -> updates of the run without its gradient

    @staticmethod
    def of(
        rule: Optimizer,
        params: Mapping[str, Tensor],
        deal: RowPartition,
        *,
        rank: int,
        holdings: Mapping[str, Holding],
        differences: Codec | None,
        shards: ShardedParameters | None = None,
        tiers: TieredStates | None = None,
    ) -> ShardedOptimizer:
        """Build the optimizer states of the rows that `rank` owns; it gathers the others as `deal` has them."""
        if tiers is not None:
            return ShardedOptimizer(rule, params, holdings, deal, rank, differences, {}, tiers=tiers)
        own = _own_of(holdings, _held(params, shards))
        if differences is not None:
            own = {n: view.float().clone() for n, view in own.items()}
        starts = {name: holdings[name].owned.rows.start for name in own}
        held = rule.init_rows(own, {name: holdings[name].shape for name in own}, starts)
        for name in own if differences is not None else ():
            held[name][_MAIN] = own[name]
        return ShardedOptimizer(rule, params, holdings, deal, rank, differences, held, shards)

    @property
    def is_sharded(self) -> bool:
        return bool(self.deal.path)

    @property
    def is_spare(self) -> bool:
        """Return whether a rank before this one holds the states of the same rows.

        That rank then reports their norm, where gradients of all islands are averaged, and writes them to checkpoints.
        """
        return self.is_sharded and not self.deal.is_first(self.rank)

    @property
    def divides_parameters(self) -> bool:
        """Return whether this rank keeps rows of the parameters that others have not."""
        return self.shards is not None or (self.tiers is not None and self.tiers.shares.divides)

    @property
    def has_spare_parameters(self) -> bool:
        """Return whether a rank before this one holds, and checkpoints, the same rows of sharded parameters."""
        return self.shards is not None and not self.deal.of_parameters.is_first(self.rank)

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor shaped like the parameter `name`; an empty tensor where it has none."""
        return self.holdings[name].own(tensor)

    def update(self, grads: Mapping[str, Tensor], *, lr_scale: float, step: int, apart: bool = False) -> None:
        """Update this rank's rows, given its rows of the mean gradients.

        `apart`: the gradients are averaged within one island of several only.
        """
        own = {name: grad for name, grad in grads.items() if self._owns(name)}
        update = self.rule.update_apart if apart else self.rule.update
        each = self.skipped if self.rule.counts_each else {}
        for skipped in sorted({each.get(name, 0) for name in own}):
            part = {name: grad for name, grad in own.items() if each.get(name, 0) == skipped}
            update(self._moved_by_rule(part), part, self.held, lr_scale=lr_scale, step=step - skipped)
        self.release()

    def restrict(self, grads: Mapping[str, Tensor]) -> None:
        """Let the optimizer set to 0 what it does not use of this rank's rows of the mean gradients."""
        if self.tiers is None:
            self.rule.restrict({name: grad for name, grad in grads.items() if self._owns(name)}, self.held)

    def see(self, vectors: Mapping[str, LayerVectors]) -> None:
        """Give the optimizer the vectors of a step's layers, before the update."""
        if vectors:
            self.rule.see(vectors, self.held)

    def _owns(self, name: str) -> bool:
        return self.holdings[name].owned.rows.count > 0

    def missed(self, names: Iterable[str]) -> None:
        """Count an update in which the parameters `names` had no gradient."""
        for name in names:
            self.skipped[name] = self.skipped.get(name, 0) + 1

    def meet(self, moved: Mapping[str, Tensor], *, rates: float) -> None:
        """Report the mean pseudo-gradients of a sync round to the optimizer (see Optimizer.meet)."""
        own = {name: self.own(name, gone) for name, gone in moved.items() if self._owns(name)}
        self.rule.meet(self._moved_by_rule(own), own, self.held, rates=rates)

    def second_moments(self, step: int, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return the second moments of `names` for islands to average, after `step` updates.

        See Optimizer.second_moments.
        """
        return self.rule.second_moments({name: self.held[name] for name in names}, step=step)

    def learn(self, squares: Mapping[str, Tensor]) -> None:
        """Give the optimizer the second moments averaged over islands."""
        self.rule.learn(squares, self.held)

    def _moved_by_rule(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return this rank's rows of the parameters named, or the float32 copies that are updated in their place."""
        there = dict(self.parameters())
        return {name: self.held[name].get(_MAIN, there[name]) for name in names}

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters' rows whose optimizer states this rank holds, by name."""
        return iter(_own_of(self.holdings, _held(self.params, self.shards)).items())

    @property
    def sharded(self) -> dict[str, tuple[Tensor, RowRange, Tensor]]:
        """Return the sharded parameters by name, trained or not: parameter (for its shape), own row range, own rows."""
        if self.tiers is not None:
            shapes, held = self.tiers.parameters.params, self.tiers.weights()
            return {n: (p, self.tiers.rows(n, p.shape), held[n]) for n, p in shapes.items()}
        if self.shards is None:
            return {}
        own, params = dict(self.shards.own()), dict(self.shards.module.named_parameters())
        return {n: (params[n], rows, own.get(n, params[n].new_empty(0))) for n, rows in self.shards.rows.items()}

    def release(self) -> None:
        """Reshard all sharded parameters."""
        if self.shards is not None:
            self.shards.release()
        if self.tiers is not None:
            self.tiers.parameters.release()

    def finish(self) -> None:
        """Say that this rank runs no more units before ranks meet; all ranks call it. Raises RunFailed."""
        if self.tiers is not None:
            self.tiers.parameters.finish()

    def leave(self) -> None:
        """Unshard all sharded parameters for good; all ranks must call it."""
        if self.shards is not None:
            self.shards.leave()
        if self.tiers is not None:
            self.tiers.leave()

    def keep(self) -> str:
        """Let the file of states in tiers stay at `close`, as the run has failed; return a remark on it, "" if none."""
        return "" if self.tiers is None else self.tiers.keep()

    def close(self) -> None:
        """End what moves states between tiers, and remove their file unless it is kept."""
        if self.tiers is not None:
            self.tiers.close()

    def waited_s(self) -> float:
        """Return the seconds this rank waited for unsharding since the last call."""
        if self.tiers is not None:
            parameters = self.tiers.parameters
            waited, parameters.exposed_s = parameters.exposed_s, 0.0
            return waited
        if self.shards is None:
            return 0.0
        waited, self.shards.exposed_s = self.shards.exposed_s, 0.0
        return waited

    def gather(self, layouts: Sequence[Layout], pump: CommThread, *, key: tuple[int, int]) -> None:
        """All-gather, after an update, the rows that this rank holds and others have updated. `key`: (seed, step)."""
        if not self.deal.back:
            return
        step = pump.begin([len(self.deal.back)] * len(layouts))
        for job, layout in enumerate(layouts):
            place = (*key, layout.entries[0].name, "gather")
            rows = self._gathered if self.differences is None else partial(self._moved, self.differences, place)
            step.submit(job, rows(layout))
        for job in range(len(layouts)):
            step.result(job)

    def _gathered(self, layout: Layout) -> Rounds:
        parts = [self.deal.part(layout, giver) for giver in self.deal.givers(self.rank)]
        bucket, held = layout.allocate(), _held(self.params, self.shards)
        views = {name: held[name].rows.of(view) for name, view in bucket.slices() if name in held}
        for name, view in views.items():
            view.copy_(held[name].tensor)
        mine = packed(bucket.flat, self.deal.part(layout, self.rank), most(parts))
        rows = yield from collected(self.deal, self.rank, mine, most(parts))
        for row, part in zip(rows, parts, strict=True):
            unpacked(row, part, bucket.flat)
        for name, view in views.items():
            held[name].tensor.copy_(view)
        return Outcome(bucket.flat[:0].clone(), None, Stateless())  # the buffer need not outlive it

    @torch.no_grad()
    def _moved(self, codec: Codec, place: tuple[int | str, ...], layout: Layout) -> Rounds:
        givers = self.deal.givers(self.rank)
        parts = [self.deal.part(layout, giver) for giver in givers]
        # Ranks with the same rows draw the same random numbers.
        key = key_at(place, givers.index(self.rank) if self.rank in givers else -1)
        bucket = as_float(layout).allocate()
        for name, view in bucket.slices():
            if name in self.held:
                rows = self.holdings[name].owned.rows
                rows.of(view).copy_(self.held[name][_MAIN] - rows.of(self.params[name]).float())
        mine = packed(bucket.flat, self.deal.part(layout, self.rank), most(parts))
        message = codec.encode(mine, key)
        messages = yield from collected(self.deal, self.rank, message, message.numel())
        moved = codec.decode(messages, most(parts), key)  # (givers, most)
        for row, part in zip(moved, parts, strict=True):
            unpacked(row, part, bucket.flat)
        for name, view in bucket.slices():
            self.params[name].copy_(self.params[name].float() + view)
        return Outcome(bucket.flat[:0].clone(), None, Stateless())  # the buffer need not outlive it

    @contextmanager
    def averaged(self, layouts: Sequence[Layout], pump: CommThread) -> Iterator[None]:
        """Load the optimizer's averaged point inside the context, where it has one; restore the parameters afterwards.

        All ranks must enter it together: they gather the rows of the others.
        """
        if not self.rule.has_average:
            yield
            return
        held = _held(self.params, self.shards)
        kept = {name: one.tensor.clone() for name, one in held.items()}
        self.load_average(layouts, pump)
        try:
            yield
        finally:
            for name, tensor in kept.items():
                held[name].tensor.copy_(tensor)
            self.release()

    @torch.no_grad()
    def load_average(self, layouts: Sequence[Layout], pump: CommThread) -> None:
        """Replace the parameters by the optimizer's averaged point, where it has one. All ranks must call it."""
        if not self.rule.has_average:
            return
        own = dict(self.parameters())
        for name, param in own.items():  # one by one: no second copy of the model
            param.copy_(self.rule.average({name: param}, self.held)[name])
        self.gather(layouts, pump, key=(0, 0))
        self.release()

    def slots(self) -> Iterator[tuple[str, str, RowRange, Tensor]]:
        """Yield (slot, parameter, this rank's rows, tensor) of all optimizer states."""
        if self.tiers is not None:
            for name, slot, tensor in self.tiers.states():
                yield slot, name, self.holdings[name].owned.rows, tensor
        for name, slots in self.held.items():
            for slot, tensor in slots.items():
                yield slot, name, self.holdings[name].owned.rows, tensor


def gather_traffic(layout: Layout, deal: RowPartition, rank: int, differences: Codec | None) -> tuple[Traffic, ...]:
    """Return the messages of the all-gather of one bucket after an update."""
    length = longest_message_numel(layout, deal, rank)
    if differences is None:
        return collecting(deal, rank, length, layout.dtype.itemsize)
    return collecting(deal, rank, differences.nbytes(length), 1)


@dataclass(frozen=True, slots=True)
class _Held:
    """The rows of a parameter that this rank keeps."""

    rows: RowRange
    tensor: Tensor


def _held(params: Mapping[str, Tensor], shards: ShardedParameters | None) -> dict[str, _Held]:
    """Return the kept rows by name, of parameters of which this rank keeps any."""
    if shards is None:
        return {n: _Held(RowRange(0, p.shape[0] if p.dim() else 1), p.detach()) for n, p in params.items()}
    return {n: _Held(shards.rows[n], tensor) for n, tensor in shards.own() if n in params}


def _own_of(holdings: Mapping[str, Holding], held: Mapping[str, _Held]) -> dict[str, Tensor]:
    """Return the owned rows, out of the kept ones."""
    owned = ((name, one.owned.rows) for name, one in holdings.items())
    return {n: rows.within(held[n].rows).of(held[n].tensor) for n, rows in owned if rows.count}
