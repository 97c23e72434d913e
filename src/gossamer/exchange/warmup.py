"""WarmUp: another exchange for the first steps, while gradients change too fast to be compressed.

Equations:
    step < steps: first(x);   from then on: inner(x)
The step is that of `ExchangeContext.key`, on which all ranks agree.
Wire:    as many rounds as the longer of both; one that is not needed is a message of nothing. `traffic` is a cap: of
         both messages of a round the larger, or, where each is the larger on some link, to every peer the larger.
State:   that of both.   Work: that of the one.
Paper:   the dense first steps of PowerSGD in DDP (Vogels et al., arXiv 1905.13727); Lin et al., arXiv 1712.01887.
Good when: a method with feedback loses its loss in the first few per cent of a run.   Not for: runs resumed from a
trained model, whose gradients are calm from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.counting import CountingChannel
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
from gossamer.exchange import Exchange, ExchangeTraits, has_residual
from gossamer.exchange.dense import Dense
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Warmup(Exchange):
    """A warm-up of the exchange: `first`, which keeps no residual, for `steps` steps, then `inner`."""

    inner: Exchange
    first: Exchange = field(default_factory=Dense)
    steps: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0:
            do = "give the number of warm-up steps, e.g. a tenth of train.steps"
            raise bad_input(wanted="steps >= 0", got=repr(self.steps), do=do, key="steps")
        if has_residual(self.first):
            raise bad_input(
                wanted="a first exchange without error feedback, as `inner` would never send what that still owes",
                got=repr(self.first),
                do="leave `first` out, which is dense then, or put error_feedback around warmup for both",
                key="first",
            )

    @property
    def parts(self) -> tuple[Exchange, ...]:
        return self.first, self.inner

    @property
    def traits(self) -> ExchangeTraits:
        both = (self.first.traits, self.inner.traits)
        lossless = all(t.lossless for t in both)
        return ExchangeTraits(
            lossless=lossless,
            fixed_size=False,
            remembers=not lossless and all(t.lossless or t.remembers for t in both),
            masked=any(t.masked for t in both),
        )

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState({}, (self.first.init(layout), self.inner.init(layout)))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        first, inner = state.inner
        rounds = len(self.traffic(x.layout, at.levels, at.rank))
        is_first = at.key[1] < self.steps
        one, own = (self.first, first) if is_first else (self.inner, inner)
        spent = len(one.traffic(x.layout, at.levels, at.rank))
        out = yield from one.run(x, own, at)
        for _ in range(rounds - spent):
            yield Message((torch.empty(0, dtype=torch.uint8),), Collective.SUM)
        after = (out.state, inner) if is_first else (first, out.state)
        return Outcome(out.mean, out.lost, ExchangeState({}, after), out.owed)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        first, inner = (one.traffic(layout, levels, rank) for one in (self.first, self.inner))
        return tuple(_cap(a, b, levels, rank) for a, b in zip_longest(first, inner))

    def contraction(self, layout: Layout) -> float | None:
        deltas = [one.contraction(layout) for one in (self.first, self.inner)]
        return None if None in deltas else min(d for d in deltas if d is not None)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.first.check(layout, levels)
        self.inner.check(layout, levels)


def _cap(a: Traffic | None, b: Traffic | None, levels: ProcessGroups, rank: int) -> Traffic:
    """Return a message that is at least as large as both on every link."""
    if a is None or b is None:
        found = a or b
        assert found is not None
        return found
    links_a, links_b = _links(a, levels, rank), _links(b, levels, rank)
    most = {peer: max(links_a.get(peer, 0), links_b.get(peer, 0)) for peer in {*links_a, *links_b}}
    for one, links in ((b, links_b), (a, links_a)):
        if links == most:
            return one
    splits = tuple(most.get(f"{rank}>{peer}", 0) for peer in levels.group("all", rank))
    return Traffic(Collective.SHUFFLE, sum(splits), 1, splits=splits, arriving=splits)


def _links(one: Traffic, levels: ProcessGroups, rank: int) -> dict[str, int]:
    priced = CountingChannel(rank, levels)
    priced.charge((one,))
    return {link: sent for link, sent in priced.meter.snapshot().items() if sent}
