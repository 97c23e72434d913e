"""StaticMask: only the gradients of unmasked weights are sent; which these are is drawn alike on all ranks.

Equations, with K the elements that the mask of train.optimizer static_mask keeps, ascending (see ops.static_mask):
    mean = inner(x on K) on K, 0 elsewhere
Symbols: x (numel,) input; the entries of a parameter without a mask are all in K and keep its shape, those of a masked
matrix are a vector of the kept ones.
Wire:    that of the inner exchange on |K| numbers: the fraction 1 - sparsity of masked matrices. Indices never travel.
State:   that of the inner exchange, on K.   Work: two passes over |K| numbers, and one over numel for zeros.
Exact for the masked gradient, which is all that the optimizer uses: as the mean is only that, masked entries count as
lost, and no feedback around this exchange may keep them. Feedback and codecs go inside, also `hierarchical`.
Good when: links are slow, and weights are trained sparse. Updated rows of a sharding are still sent whole.
Paper:   the mask of Thangarasa et al., SPDF, UAI 2023, arXiv:2303.10464. The paper trains on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Entry, Layout
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange.dense import Dense
from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.row_range import RowRange, whole_of
from gossamer.spec.validate import below_one


@dataclass(frozen=True)
class StaticMask(Exchange):
    """An exchange of the unmasked entries by `inner`. The other settings are those of train.optimizer static_mask."""

    inner: Exchange = field(default_factory=Dense)
    sparsity: float = 0.75
    seed: int = 0
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        below_one("sparsity", self.sparsity)
        if self.inner.traits.masked:
            do = "write one static_mask around the inner exchange"
            raise bad_input(wanted="an inner exchange without a mask", got="static_mask", do=do, key="inner")
        for pattern in self.parameters:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"{pattern!r} is no regular expression: {error}", key="parameters") from None

    @property
    def mask(self) -> StaticMaskDraw:
        """Return how the masks are drawn."""
        return StaticMaskDraw(sparsity=self.sparsity, seed=self.seed, parameters=self.parameters)

    @property
    def traits(self) -> ExchangeTraits:
        return replace(self.inner.traits, lossless=False, masked=True)

    @property
    def has_true_norm(self) -> bool:
        return self.inner.has_true_norm

    @property
    def needs_islands(self) -> bool:
        return self.inner.needs_islands

    def for_island(self) -> Exchange:
        inner = self.inner.for_island()
        return self if inner is self.inner else replace(self, inner=inner)

    def rounding_error_weight(self, at: ExchangeContext) -> float:
        return self.inner.rounding_error_weight(at)

    def init(self, layout: Layout) -> ExchangeState:
        part = self._part(layout)
        return ExchangeState(inner=(part.spread_state(self.inner.init(part.layout)),))

    def owned(self, layout: Layout, levels: ProcessGroups, rank: int) -> dict[str, Tensor]:
        part = self._part(layout)
        return {f"0/{path}": part.spread(mine) for path, mine in self.inner.owned(part.layout, levels, rank).items()}

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        part = self._part(x.layout)
        sent, given = part.taken(x.flat), x.flat.float().clone() if at.accounts else None
        out = yield from self.inner.run(Bucket(part.layout, sent), part.state_of(state.inner[0]), at)
        lost = None
        if given is not None:
            kept = torch.zeros_like(part.taken(given)) if out.lost is None else out.lost
            lost = part.put(kept, given)
        mean = part.put(out.mean, x.flat.zero_())
        owed = None if out.owed is None else part.spread(out.owed)
        return Outcome(mean, lost, ExchangeState(inner=(part.spread_state(out.state),)), owed)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(self._part(layout).layout, levels, rank)

    def expected_traffic(
        self, layout: Layout, levels: ProcessGroups, rank: int, occupied: float
    ) -> tuple[Traffic, ...]:
        return self.inner.expected_traffic(self._part(layout).layout, levels, rank, occupied)

    def contraction(self, layout: Layout) -> float | None:
        return None  # of a gradient of masked weights alone everything is lost

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        part = next((one.name for one in layout.entries if RowRange.read(one.name)), None)
        if part is not None:
            raise bad_input(
                wanted="whole parameters in the buckets of static_mask, whose masks are drawn for a parameter",
                got=part,
                do=f"name {whole_of(part)} in its place, or leave plan.buckets out",
                key="plan.buckets",
            )
        self.inner.check(self._part(layout).layout, levels)

    def _part(self, layout: Layout) -> _KeptPart:
        """Return the kept part of a bucket; it is computed once per bucket."""
        if layout not in self._known:
            self._known[layout] = _KeptPart.of(self.mask, layout)
        return self._known[layout]

    @cached_property
    def _known(self) -> dict[Layout, _KeptPart]:
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class _KeptPart:
    """The kept elements of a bucket: their places, ascending, and their layout as a bucket of its own."""

    numel: int  # of the whole bucket
    places: Tensor  # (kept,) int64
    layout: Layout

    @staticmethod
    def of(draw: StaticMaskDraw, layout: Layout) -> _KeptPart:
        entries, places, start = list[Entry](), list[Tensor](), 0
        for one in layout.entries:
            is_covered = draw.covers(one.name, one.shape)
            count = draw.kept_count(one.name, one.shape)
            there = torch.arange(one.numel, device=layout.device)
            if is_covered and layout.device.type != "meta":  # of a plan only sizes are asked
                there = there[draw.kept(one.name, one.shape, layout.device).view(-1)]
            entries.append(Entry(one.name, (count,) if is_covered else one.shape, start))
            places.append(there[:count].add_(one.start))
            start += count
        every = torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=layout.device)
        return _KeptPart(layout.numel, every, replace(layout, entries=tuple(entries)))

    def taken(self, flat: Tensor) -> Tensor:
        """Return the kept elements of a buffer like the bucket, as a copy."""
        return flat.index_select(0, self.places)

    def put(self, kept: Tensor, flat: Tensor) -> Tensor:
        """Put kept elements in their places in `flat`, and return it."""
        return flat.index_copy_(0, self.places, kept)

    def spread(self, kept: Tensor) -> Tensor:
        """Return a buffer like the bucket with the kept elements in their places, zeros elsewhere."""
        return self.put(kept, kept.new_zeros(self.numel))

    def spread_state(self, state: ExchangeState) -> ExchangeState:
        """Return a state with the size of the bucket, as checkpoints cut it up by parameter, from one of the part."""
        return self._each(state, self.layout.numel, self.spread)

    def state_of(self, state: ExchangeState) -> ExchangeState:
        """Return the state of the part, from one with the size of the bucket."""
        return self._each(state, self.numel, self.taken)

    def _each(self, state: ExchangeState, numel: int, change: Callable[[Tensor], Tensor]) -> ExchangeState:
        tensors = {
            name: change(one) if "@" not in name and one.shape == (numel,) else one
            for name, one in state.tensors.items()
        }
        return ExchangeState(tensors, tuple(self._each(inner, numel, change) for inner in state.inner))
