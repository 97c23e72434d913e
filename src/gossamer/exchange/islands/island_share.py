"""Each rank's share of a bucket inside its island, and an exchange between islands among ranks with the same share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import (
    Collective,
    ExchangeContext,
    ExchangeState,
    Message,
    Outcome,
    ProcessGroups,
    Rounds,
    Traffic,
)
from gossamer.exchange import Exchange
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class OwnerRange:
    """A range of a bucket with one owner: whole entries in [start, stop), and their layout as a bucket of its own."""

    start: int
    stop: int
    layout: Layout

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class IslandShare:
    """A rank's share of a bucket inside its island.

    `island`: the ranks of the island, ascending; `me`: this rank's index among them; `runs`: the ranges that the first
    ranks own, one each, in order.
    """

    whole: Layout
    levels: ProcessGroups
    island: tuple[int, ...]
    me: int
    runs: tuple[OwnerRange, ...]

    @staticmethod
    def of(layout: Layout, levels: ProcessGroups, rank: int, divided: RangeSplitter | None = None) -> IslandShare:
        """Divide a bucket: on every island as many ranks own a range as the smallest island has ranks.

        So every owner has a counterpart on all islands. `divided`: returns the ranges of so many owners; by default
        whole entries in order (`cut`).
        """
        island, owners = levels.group("island", rank), len(levels.owners(rank))
        return IslandShare(layout, levels, island, island.index(rank), (divided or cut)(layout, owners))

    @property
    def mine(self) -> OwnerRange:
        return self.runs[self.me] if self.me < len(self.runs) else self.nobody

    @property
    def nobody(self) -> OwnerRange:
        """Return the empty range of a rank without a counterpart."""
        return OwnerRange(self.whole.numel, self.whole.numel, replace(self.whole, entries=()))

    def shares(self, weights: Tensor) -> list[float]:
        """Return the weights of the island's ranks in its mean; equal ones where the island has no weight."""
        mine = weights[list(self.island)]
        total = float(mine.sum())
        return [float(w) / total for w in mine] if total > 0 else [1 / len(mine)] * len(mine)

    def totals(self, weights: Tensor) -> Tensor:
        """Return the weights between islands: an owner has its island's total, a rank without counterpart one."""
        found = torch.ones_like(weights)
        for island in self.levels.groups["island"]:
            found[list(island[: len(self.runs)])] = weights[list(island)].sum()
        return found

    def runs_between(self) -> list[tuple[int, Layout]]:
        """Return (rank, its layout) for one rank of every kind: all cases of the exchange between islands."""
        group = self.levels.group("all", self.island[0])
        islands = [g for g in self.levels.groups["island"] if g[0] in group]
        alone = [(g[-1], self.nobody.layout) for g in islands if len(g) > len(self.runs)]
        return [*((islands[0][k], run.layout) for k, run in enumerate(self.runs)), *alone[:1]]


RangeSplitter = Callable[[Layout, int], tuple[OwnerRange, ...]]


def across(between: Exchange, x: Bucket, state: ExchangeState, at: ExchangeContext, here: IslandShare) -> Rounds:
    """Run `between` at its level on this rank's range, then send empty messages until all owners have sent as many."""
    weights = here.totals(at.weights)
    method = between.run(x, state, replace(at, levels=at.levels.only("between"), weights=weights))
    left, reply = rounds_across(between, here), None
    try:
        while True:
            message = next(method) if reply is None else method.send(reply)
            left -= 1
            reply = yield replace(message, level="between")
    except StopIteration as end:
        out: Outcome = end.value
    finally:
        method.close()
    for _ in range(left):
        yield Message((x.flat.new_empty(0, dtype=torch.uint8),), Collective.SUM, "between")
    return out


def traffic_across(between: Exchange, here: IslandShare, rank: int, occupied: float = 1.0) -> tuple[Traffic, ...]:
    """Return the messages of `across`, for a bucket of which the part `occupied` is not zero on some rank."""
    inner = between.expected_traffic(here.mine.layout, here.levels.only("between"), rank, occupied)
    nothing = (Traffic(Collective.SUM, 0, 1),) * (rounds_across(between, here) - len(inner))
    return tuple(replace(t, level="between") for t in (*inner, *nothing))


def rounds_across(between: Exchange, here: IslandShare) -> int:
    """Return the number of messages that `between` sends for the range that needs most."""
    only = here.levels.only("between")
    return max(len(between.traffic(owned, only, rank)) for rank, owned in here.runs_between())


def check_across(
    between: Exchange, layout: Layout, levels: ProcessGroups, divided: RangeSplitter | None = None
) -> None:
    """Raise BadInput where there are no islands, or where `between` cannot serve an owner's range."""
    if not {"island", "between"} <= set(levels.groups):
        do = "list the ranks of each island in machines.islands, or use the exchange of `inter` by itself"
        got = f"only the process groups {', '.join(levels.groups)}"
        raise bad_input(wanted="islands of ranks, for an exchange between islands", got=got, do=do)
    for _, owned in IslandShare.of(layout, levels, levels.groups["all"][0][0], divided).runs_between():
        between.check(owned, levels.only("between"))


def cut(layout: Layout, owners: int) -> tuple[OwnerRange, ...]:
    """Return `owners` ranges that cover the layout, cut at the entry boundaries closest to equal sizes."""
    borders = [0, *(e.start + e.numel for e in layout.entries)]
    wanted = [layout.numel * k / owners for k in range(1, owners)]
    inner = (min(range(len(borders)), key=lambda i: abs(borders[i] - w)) for w in wanted)
    cuts = [0, *inner, len(layout.entries)]
    return tuple(_run(layout, first, last, borders) for first, last in pairwise(cuts))


def _run(layout: Layout, first: int, last: int, borders: list[int]) -> OwnerRange:
    entries = tuple(replace(e, start=e.start - borders[first]) for e in layout.entries[first:last])
    return OwnerRange(borders[first], borders[last], replace(layout, entries=entries))


def part_of(state: ExchangeState, place: IslandShare) -> ExchangeState:
    """Return the state of this rank's range, out of the state of a bucket.

    It has slices of tensors shaped like the bucket, the "field@parameter" tensors of its own parameters, and all else
    as it is.
    """
    names = {e.name for e in place.mine.layout.entries}
    tensors = {
        name: tensor[place.mine.slice] if _by_entry(name, tensor, place) else tensor
        for name, tensor in state.tensors.items()
        if "@" not in name or name.partition("@")[2] in names
    }
    return ExchangeState(tensors, tuple(part_of(inner, place) for inner in state.inner))


def put_back(state: ExchangeState, place: IslandShare, part: ExchangeState) -> ExchangeState:
    """Return `state` with the state of this rank's range replaced, as a new one."""
    tensors = dict(state.tensors)
    for name, tensor in part.tensors.items():
        old = state.tensors[name]
        if _by_entry(name, old, place):
            tensor = torch.cat((old[: place.mine.start], tensor, old[place.mine.stop :]))
        tensors[name] = tensor
    return ExchangeState(tensors, tuple(put_back(a, place, b) for a, b in zip(state.inner, part.inner, strict=True)))


def _by_entry(name: str, tensor: Tensor, place: IslandShare) -> bool:
    return "@" not in name and tensor.shape == (place.whole.numel,)
