"""The update rule's state on one rank, the update itself, and how everybody comes to know what others have updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gossamer.compress._key import key_at
from gossamer.compress.codec import Codec
from gossamer.memory._rows import Rows, rows_of
from gossamer.memory._scatter import most, packed, parts_of, unpacked
from gossamer.memory._shards import Shards
from gossamer.optim import Rule, State
from gossamer.wire.bucket import Bucket, Layout, as_float
from gossamer.wire.message import Combine, Levels, Message, Outcome, Rounds, Traffic
from gossamer.wire.message import State as Stateless
from gossamer.wire.pump import Pump

_MAIN = "main"


@dataclass(slots=True)
class States:
    """`rows`: this rank's, by name; where it holds all of every parameter, there is nothing to gather. `weights`: a
    code for what the rows have moved by. Then the rule moves float32 copies of its own, `main` among its state, and the
    parameters are what all ranks make of the code, this one's own rows too: so they are the same everywhere, and what
    was lost on the way is part of the next difference. `shards`: where the parameters themselves are sharded, the rows
    are what is there of them, and nothing is gathered until a unit runs.
    """

    rule: Rule
    params: Mapping[str, Tensor]
    rows: Mapping[str, Rows]
    is_sharded: bool
    weights: Codec | None
    held: State
    shards: Shards | None = None

    @staticmethod
    def of(
        rule: Rule,
        params: Mapping[str, Tensor],
        *,
        is_sharded: bool,
        weights: Codec | None,
        place: int,
        ranks: int,
        shards: Shards | None = None,
    ) -> States:
        """`place` among the `ranks` that hold the same parameters."""
        mine = {n: rows_of(n, p.shape, ranks)[place] if is_sharded else _all(p) for n, p in params.items()}
        there = dict(shards.own()) if shards is not None else {}
        own = {n: there.get(n, rows.of(params[n].detach())) for n, rows in mine.items() if _any(rows)}
        if weights is not None:
            own = {n: view.float().clone() for n, view in own.items()}
        held = rule.init(own)
        for name in own if weights is not None else ():
            held[name][_MAIN] = own[name]
        return States(rule, params, mine, is_sharded, weights, held, shards)

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's rows of something shaped like a parameter; nothing of it where it has none."""
        rows = self.rows[name]
        return rows.of(tensor) if _any(rows) else tensor.new_empty(0)

    def update(self, grads: Mapping[str, Tensor], *, lr_scale: float, step: int) -> None:
        """Move this rank's rows, given its rows of the mean gradients."""
        own = {name: grad for name, grad in grads.items() if _any(self.rows[name])}
        there = dict(self.parameters())
        params = {name: self.held[name].get(_MAIN, there[name]) for name in own}
        self.rule.update(params, own, self.held, lr_scale=lr_scale, step=step)
        self.release()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of the parameters; of sharded ones, those that are not trained too."""
        if self.shards is not None:
            return self.shards.own()
        mine = {name: rows for name, rows in self.rows.items() if _any(rows)}
        return ((name, rows.of(self.params[name].detach())) for name, rows in mine.items())

    @property
    def sharded(self) -> dict[str, tuple[Tensor, Rows, Tensor]]:
        """The parameters that are sharded themselves, by name: the parameter (its shape is all there is of it), which
        rows are this rank's, and these.
        """
        if self.shards is None:
            return {}
        own, params = dict(self.shards.own()), dict(self.shards.module.named_parameters())
        return {n: (params[n], rows, own.get(n, params[n].new_empty(0))) for n, rows in self.shards.rows.items()}

    def release(self) -> None:
        """Let go what was gathered of sharded parameters."""
        if self.shards is not None:
            self.shards.release()

    def leave(self) -> None:
        """Make sharded parameters whole again, for good; all ranks call it."""
        if self.shards is not None:
            self.shards.leave()

    def waited_s(self) -> float:
        """For what was gathered, since it was last asked."""
        if self.shards is None:
            return 0.0
        waited, self.shards.exposed_s = self.shards.exposed_s, 0.0
        return waited

    def gather(self, layouts: Sequence[Layout], pump: Pump, *, key: tuple[int, int]) -> None:
        """After an update: take over what the others have updated. `key`: (seed, step)."""
        if not self.is_sharded or self.shards is not None:
            return
        levels, rank = pump.channel.levels, pump.channel.rank
        members = levels.group("all", rank)
        step = pump.begin([1] * len(layouts))
        for job, layout in enumerate(layouts):
            place = (*key, layout.entries[0].name, "gather")
            rows = self._gathered if self.weights is None else partial(self._differences, self.weights, place)
            step.submit(job, rows(layout, members.index(rank), len(members)))
        for job in range(len(layouts)):
            step.result(job)

    def _gathered(self, layout: Layout, me: int, ranks: int) -> Rounds:
        parts = parts_of(layout, ranks)
        bucket = layout.allocate()
        for name, view in bucket.slices():
            view.copy_(self.params[name].detach())
        (rows,) = yield Message((packed(bucket.flat, parts[me], most(parts)),), Combine.GATHER)
        for row, part in zip(rows, parts, strict=True):
            unpacked(row, part, bucket.flat)
        for name, view in Bucket(layout, bucket.flat).slices():
            self.params[name].detach().copy_(view)
        return Outcome(bucket.flat[:0].clone(), None, Stateless())  # the buffer need not outlive it

    @torch.no_grad()
    def _differences(self, codec: Codec, place: tuple[int | str, ...], layout: Layout, me: int, ranks: int) -> Rounds:
        parts, key = parts_of(layout, ranks), key_at(place, me)
        bucket = as_float(layout).allocate()
        for name, view in bucket.slices():
            if name in self.held:
                rows = self.rows[name]
                rows.of(view).copy_(self.held[name][_MAIN] - rows.of(self.params[name]).float())
        (messages,) = yield Message((codec.encode(packed(bucket.flat, parts[me], most(parts)), key),), Combine.GATHER)
        moved = codec.decode(messages, most(parts), key)  # (ranks, most)
        for row, part in zip(moved, parts, strict=True):
            unpacked(row, part, bucket.flat)
        for name, view in bucket.slices():
            self.params[name].copy_(self.params[name].float() + view)
        return Outcome(bucket.flat[:0].clone(), None, Stateless())  # the buffer need not outlive it

    def slots(self) -> Iterator[tuple[str, str, Rows, Tensor]]:
        """(slot, parameter, this rank's rows, tensor) of all state."""
        for name, slots in self.held.items():
            for slot, tensor in slots.items():
                yield slot, name, self.rows[name], tensor


def gather_traffic(layout: Layout, levels: Levels, rank: int, weights: Codec | None) -> Traffic:
    """What a gather after an update sends of a bucket."""
    longest = most(parts_of(layout, len(levels.group("all", rank))))
    if weights is None:
        return Traffic(Combine.GATHER, longest, layout.dtype.itemsize)
    return Traffic(Combine.GATHER, weights.nbytes(longest), 1)


def _all(param: Tensor) -> Rows:
    return Rows(0, param.shape[0] if param.dim() else 1)


def _any(rows: Rows) -> bool:
    return rows.count > 0
