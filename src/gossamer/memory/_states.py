"""The update rule's state on one rank, the update itself, and how everybody comes to know what others have updated."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from gossamer.compress._key import key_at
from gossamer.compress.codec import Codec
from gossamer.memory._rows import Deal, Rows
from gossamer.memory._scatter import most, packed, unpacked
from gossamer.optim import Rule, State
from gossamer.wire.bucket import Bucket, Layout, as_float
from gossamer.wire.message import Combine, Message, Outcome, Rounds, Traffic
from gossamer.wire.message import State as Stateless
from gossamer.wire.pump import Pump

_MAIN = "main"


@dataclass(slots=True)
class States:
    """`rows`: this rank's, by name; where it holds all of every parameter, there is nothing to gather. What is dealt
    out level by level is gathered so as well, the other way round: rows between islands once, and then inside.
    `weights`: a code for what the rows have moved by. Then the rule moves float32 copies of its own, `main` among its
    state, and the parameters are what all ranks make of the code, this one's own rows too: so they are the same
    everywhere, and what was lost on the way is part of the next difference.
    """

    rule: Rule
    params: Mapping[str, Tensor]
    rows: Mapping[str, Rows]
    deal: Deal
    rank: int
    weights: Codec | None
    held: State

    @staticmethod
    def of(rule: Rule, params: Mapping[str, Tensor], deal: Deal, *, rank: int, weights: Codec | None) -> States:
        """What `rank` holds where rows are dealt out so."""
        mine = {name: deal.rows(name, p.shape, rank) for name, p in params.items()}
        own = {n: rows.of(params[n].detach()) for n, rows in mine.items() if _any(rows)}
        if weights is not None:
            own = {n: view.float().clone() for n, view in own.items()}
        held = rule.init(own)
        for name in own if weights is not None else ():
            held[name][_MAIN] = own[name]
        return States(rule, params, mine, deal, rank, weights, held)

    @property
    def is_sharded(self) -> bool:
        return bool(self.deal.path)

    @property
    def is_spare(self) -> bool:
        """Whether a rank before this one holds the same rows, and counts and writes them."""
        return self.is_sharded and not self.deal.is_first(self.rank)

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's rows of something shaped like a parameter; nothing of it where it has none."""
        rows = self.rows[name]
        return rows.of(tensor) if _any(rows) else tensor.reshape(-1)[:0]

    def update(self, grads: Mapping[str, Tensor], *, lr_scale: float, step: int, apart: bool = False) -> None:
        """Move this rank's rows, given the mean gradients, of which the others' rows are not looked at. `apart`: they
        are those of one island among several.
        """
        mine = {name: self.rows[name] for name in grads if _any(self.rows[name])}
        params = {name: self._moved_by_rule(name) for name in mine}
        own = {name: rows.of(grads[name]) for name, rows in mine.items()}
        update = self.rule.update_apart if apart else self.rule.update
        update(params, own, self.held, lr_scale=lr_scale, step=step)

    def meet(self, moved: Mapping[str, Tensor], *, rates: float) -> None:
        """Tell the rule that islands have met (see Rule.meet). All of every parameter must be this rank's."""
        params = {name: self._moved_by_rule(name) for name in moved}
        self.rule.meet(params, moved, self.held, rates=rates)

    def _moved_by_rule(self, name: str) -> Tensor:
        return self.held[name].get(_MAIN, self.rows[name].of(self.params[name].detach()))

    def gather(self, layouts: Sequence[Layout], pump: Pump, *, key: tuple[int, int]) -> None:
        """After an update: take over what the others have updated. `key`: (seed, step)."""
        if not self.is_sharded:
            return
        step = pump.begin([len(self.deal.path)] * len(layouts))
        for job, layout in enumerate(layouts):
            place = (*key, layout.entries[0].name, "gather")
            rows = self._gathered if self.weights is None else partial(self._differences, self.weights, place)
            step.submit(job, rows(layout))
        for job in range(len(layouts)):
            step.result(job)

    def _gathered(self, layout: Layout) -> Rounds:
        parts = [self.deal.part(layout, giver) for giver in self.deal.givers(self.rank)]
        bucket = layout.allocate()
        for name, view in bucket.slices():
            view.copy_(self.params[name].detach())
        mine = packed(bucket.flat, self.deal.part(layout, self.rank), most(parts))
        rows = yield from self._collected(mine)
        for row, part in zip(rows, parts, strict=True):
            unpacked(row, part, bucket.flat)
        for name, view in Bucket(layout, bucket.flat).slices():
            self.params[name].detach().copy_(view)
        return Outcome(bucket.flat, None, Stateless())

    @torch.no_grad()
    def _differences(self, codec: Codec, place: tuple[int | str, ...], layout: Layout) -> Rounds:
        givers = self.deal.givers(self.rank)
        parts = [self.deal.part(layout, giver) for giver in givers]
        key = key_at(place, givers.index(self.rank) if self.rank in givers else -1)  # who has the same rows draws alike
        bucket = as_float(layout).allocate()
        for name, view in bucket.slices():
            if name in self.held:
                rows = self.rows[name]
                rows.of(view).copy_(self.held[name][_MAIN] - rows.of(self.params[name]).float())
        mine = packed(bucket.flat, self.deal.part(layout, self.rank), most(parts))
        messages = yield from self._collected(codec.encode(mine, key))
        moved = codec.decode(messages, most(parts), key)  # (givers, most)
        for row, part in zip(moved, parts, strict=True):
            unpacked(row, part, bucket.flat)
        for name, view in bucket.slices():
            self.params[name].copy_(self.params[name].float() + view)
        return Outcome(bucket.flat, None, Stateless())

    def _collected(self, mine: Tensor) -> Generator[Message, tuple[Tensor, ...], Tensor]:
        """(givers, length): every giver's `mine`, which has the same length on all ranks."""
        found = mine
        for turn in collecting(self.deal, self.rank, mine.numel(), mine.element_size()):
            copies = 1 if turn.splits is None else sum(map(bool, turn.splits))
            part = found.flatten() if copies == 1 else found.flatten().repeat(copies)
            (found,) = yield Message((part,), turn.combine, turn.level, turn.splits, turn.arriving)
        return found.view(len(self.deal.givers(self.rank)), mine.numel())

    def slots(self) -> Iterator[tuple[str, str, Rows, Tensor]]:
        """(slot, parameter, this rank's rows, tensor) of all state."""
        for name, slots in self.held.items():
            for slot, tensor in slots.items():
                yield slot, name, self.rows[name], tensor


def gather_traffic(layout: Layout, deal: Deal, rank: int, weights: Codec | None) -> tuple[Traffic, ...]:
    """What a gather after an update sends of a bucket."""
    longest = most([deal.part(layout, giver) for giver in deal.givers(rank)])
    if weights is None:
        return collecting(deal, rank, longest, layout.dtype.itemsize)
    return collecting(deal, rank, weights.nbytes(longest), 1)


def collecting(deal: Deal, rank: int, length: int, itemsize: int) -> tuple[Traffic, ...]:
    """The messages by which every rank comes to have those of `length` elements of all givers: the last level of the
    path first. Where only some of a group have anything, these send it to each of the others.
    """
    found = []
    for depth, level in reversed(list(enumerate(deal.path))):
        group, owners = deal.levels.group(level, rank), deal.owners(level, rank)
        block = length * prod(len(deal.owners(deeper, owners[0])) for deeper in deal.path[depth + 1 :])
        if owners == group:
            found.append(Traffic(Combine.GATHER, block, itemsize, level))
            continue
        splits = (block if rank in owners else 0,) * len(group)
        arriving = tuple(block if peer in owners else 0 for peer in group)
        found.append(Traffic(Combine.SHUFFLE, sum(splits), itemsize, level, splits, arriving))
    return tuple(found)


def _any(rows: Rows) -> bool:
    return rows.count > 0
