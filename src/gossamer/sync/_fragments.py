"""Fragments of a model that are synchronized one after the other: their parameters and their state."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.comm_thread import CommStep
from gossamer.comm.message import ExchangeState, Outcome
from gossamer.sync._state_by_name import refilled, state_by_name
from gossamer.sync.outer import OuterState, OuterStep


@dataclass(slots=True)
class FragmentBucket:
    """A bucket of a fragment: its global parameters (anchor) and the states of its exchanges."""

    layout: Layout
    anchor: Tensor  # (numel,) float32
    state: ExchangeState  # of the exchange of pseudo-gradients
    was: Tensor  # parameters before this step; empty where single steps are not averaged
    each: ExchangeState  # of the exchange of single steps

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its view in `flat`, (numel,)."""
        yield from Bucket(self.layout, flat).slices()


@dataclass(slots=True)
class PendingSync:
    """A pending sync of a fragment, sent after step `since`.

    `takes_part`: whether this rank's pseudo-gradient counts in it. `left`: this rank's parameters when it was sent, as
    buffers like the anchors; empty unless `carries`.
    """

    since: int
    at: OuterStep
    takes_part: bool
    under_way: CommStep | None
    outcomes: tuple[Outcome, ...] = ()
    left: tuple[Tensor, ...] = ()

    def wait(self) -> tuple[Outcome, ...]:
        """Wait for the exchange and return the outcome of each bucket."""
        if (step := self.under_way) is not None:  # two threads may ask
            self.outcomes = tuple(step.result(i) for i in range(len(step.rounds)))
            self.under_way = None
        return self.outcomes

    def free_buffers(self, states: Sequence[ExchangeState]) -> None:
        """Free the buffers of a sync that has been applied; keep the exchange's `states`."""
        nothing = torch.zeros(0)
        self.outcomes, self.left = tuple(Outcome(nothing, None, state) for state in states), ()


@dataclass(slots=True)
class SecondMomentSync:
    """A pending or finished average of a fragment's second moments: buffers like the anchors."""

    under_way: CommStep | None
    means: tuple[Tensor, ...] = ()

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the average and return the mean second moments of each bucket."""
        if self.under_way is not None:
            found = (self.under_way.result(i) for i in range(len(self.under_way.rounds)))
            self.means, self.under_way = tuple(outcome.mean.float() for outcome in found), None
        return self.means


@dataclass(frozen=True, slots=True)
class SyncLaunch:
    """A launched sync of a fragment.

    `flight` is None where no rank takes part: all then return to the global parameters.
    """

    flight: PendingSync | None
    squares: SecondMomentSync | None = None


@dataclass(slots=True)
class FragmentProgress:
    """A fragment's progress in sending, which may be ahead of what its island has applied.

    `rounds`: rounds sent; `states`: the exchange's states before the last of them; `last`: that round, which may have
    been applied.
    """

    rounds: int
    states: list[ExchangeState]
    last: PendingSync | None

    def next(self, departed: SyncLaunch) -> None:
        """Advance by one round, unless no rank took part in it."""
        if departed.flight is not None:
            self.states, self.rounds, self.last = self.now(), self.rounds + 1, departed.flight

    def now(self) -> list[ExchangeState]:
        """Return the exchange's states after the last round has ended; those before it if its mean is not finite."""
        outcomes = self.last.wait() if self.last is not None else ()
        if not outcomes or not are_finite([outcome.mean for outcome in outcomes]):
            return self.states
        return [outcome.state for outcome in outcomes]


@dataclass(slots=True, eq=False)
class Fragment:
    """The mutable state of one model fragment: buckets, outer-optimizer state, counters and pending sync.

    Compared by identity.
    """

    parts: list[FragmentBucket]
    outer: OuterState
    rounds: int = 0
    steps: int = 0  # in the round so far, by any island
    made: int = 0  # of these, by this island
    rates: float = 0.0  # sum of the learning rates of those
    samples: float = 0.0  # of this rank
    flight: PendingSync | None = None
    squares: SecondMomentSync | None = None

    @property
    def anchors(self) -> list[Tensor]:
        return [part.anchor for part in self.parts]

    def shared(self, index: int, numbers: Collection[str]) -> dict[str, Tensor]:
        """Return the state that is equal on all ranks, without the anchor. No collective may be pending.

        `index`: of this fragment; `numbers`: the outer optimizer's states that are single numbers.
        """
        found = {f"{slot}/{index}": self.outer[slot][0] for slot in numbers}
        for slot, tensors in self.outer.items():
            if slot not in numbers:
                found.update(self._by_name(slot, tensors))
        found[f"counts/{index}"] = torch.tensor(self._counts(), dtype=torch.float64)
        if self.flight is not None:
            found.update(self._by_name("arrived", [outcome.mean.float() for outcome in self.flight.outcomes]))
        if self.squares is not None:
            found.update(self._by_name("squares", self.squares.means))
        return found

    def own(self, index: int) -> dict[str, Tensor]:
        """Return the state of this rank alone, without its parameters.

        An exchange's state is that after the pending round, unless its mean is not finite, and so never applied.
        """
        found: dict[str, Tensor] = {}
        outcomes = self.flight.outcomes if self.flight else ()
        is_applied = bool(outcomes) and are_finite([one.mean for one in outcomes])
        states = [one.state for one in outcomes] if is_applied else [part.state for part in self.parts]
        for part, state in zip(self.parts, states, strict=True):
            found.update({f"rounds/{n}": t for n, t in state_by_name(part.layout, state).items()})
            found.update({f"steps/{n}": t for n, t in state_by_name(part.layout, part.each).items()})
        if self.flight is not None and self.flight.left:
            found.update(self._by_name("left", self.flight.left))
        takes_part = float(self.flight.takes_part) if self.flight else 1.0
        found[f"seen/{index}"] = torch.tensor([self.samples, takes_part, self.rates, self.made], dtype=torch.float64)
        return found

    def restore(
        self, index: int, numbers: Collection[str], shared: Mapping[str, Tensor], own: Mapping[str, Tensor]
    ) -> None:
        """Load the tensors of `shared` and `own`; all of `own` may be missing."""
        for slot, tensors in self.outer.items():
            if slot in numbers:
                tensors[0].copy_(shared[f"{slot}/{index}"])
            else:
                for name, view in self._by_name(slot, tensors).items():
                    view.copy_(shared[name])
        nothing = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        self.samples, takes_part, self.rates, made = own.get(f"seen/{index}", nothing).tolist()
        self.made = int(made)
        for part in self.parts:
            part.state = refilled(part.layout, part.state, _under("rounds", own))
            part.each = refilled(part.layout, part.each, _under("steps", own))
        counts = shared[f"counts/{index}"].tolist()
        self._take_counts(counts, _under("arrived", shared), takes_part=takes_part > 0)
        squares = _under("squares", shared)
        self.squares = SecondMomentSync(None, tuple(self._flats(squares))) if self._has_all(squares) else None
        left = _under("left", own)
        if self.flight is not None and self._has_all(left):
            self.flight.left = tuple(self._flats(left))

    def _has_all(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(e.name in tensors for part in self.parts for e in part.layout.entries)

    def _flats(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return copies as buffers like the anchors."""
        return [
            torch.cat([tensors[e.name].reshape(-1) for e in part.layout.entries]).to(part.anchor) for part in self.parts
        ]

    def _by_name(self, kind: str, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views of buffers like the anchors, by "kind/parameter"."""
        return {f"{kind}/{name}": view for name, view in self.views(flats).items()}

    def views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views of flat buffers by parameter name."""
        pairs = zip(self.parts, flats, strict=True)
        return {name: view for part, flat in pairs for name, view in part.views(flat)}

    def _counts(self) -> list[float]:
        """Return the counters: rounds, steps, and the pending sync's step (-1: none), number, steps, rates and key."""
        now = [self.rounds, self.steps]
        if self.flight is None:
            return [*now, -1, 0, 0, 0, 0, 0, 0]
        at = self.flight.at
        return [*now, self.flight.since, at.number, at.steps, at.rates, *at.key]

    def _take_counts(self, counts: Sequence[float], arrived: Mapping[str, Tensor], *, takes_part: bool) -> None:
        """Load the counters of `_counts`; a sync that was pending has finished since."""
        rounds, steps, since, number, of, rates, *key = counts
        self.rounds, self.steps, self.flight = int(rounds), int(steps), None
        if since < 0:
            return
        at = OuterStep(int(number), of, rates, (int(key[0]), int(key[1]), int(key[2])))
        pairs = zip(self._flats(arrived), self.parts, strict=True)
        outcomes = tuple(Outcome(mean, None, part.state) for mean, part in pairs)
        self.flight = PendingSync(int(since), at, takes_part, None, outcomes)


def are_finite(flats: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite, by the sum of each buffer, which is the cheapest test."""
    return all(math.isfinite(flat.sum().item()) for flat in flats)


def fragments_of(params: Mapping[str, Tensor], fragments: int, units: Sequence[str] = ()) -> list[list[str]]:
    """Divide the names of `params` into at most `fragments` fragments of about equal bytes, each in parameter order.

    The parameters of one unit (a block) stay together. The largest unit is placed first, each in the smallest fragment.
    So equal blocks alternate between fragments, a strided pattern as in Streaming DiLoCo. Fewer units make fewer
    fragments.
    """
    held: dict[str, list[str]] = {}
    for name in params:
        held.setdefault(_unit_of(name, units), []).append(name)
    size = {unit: sum(params[n].nbytes for n in names) for unit, names in held.items()}
    bins: list[list[str]] = [[] for _ in range(min(fragments, len(held)))]
    loads = [0] * len(bins)
    for unit in sorted(held, key=lambda unit: -size[unit]):
        least = loads.index(min(loads))
        loads[least] += size[unit]
        bins[least] += held[unit]
    position = {name: i for i, name in enumerate(params)}
    return [sorted(names, key=position.__getitem__) for names in bins]


def _unit_of(name: str, units: Sequence[str]) -> str:
    """Return the innermost unit that holds a parameter, or the module that owns it."""
    inside = [unit for unit in units if name.startswith(f"{unit}.")]
    return max(inside, key=len) if inside else name.rpartition(".")[0]


def _under(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under "kind/", by the rest of their names."""
    return {name.removeprefix(f"{kind}/"): t for name, t in tensors.items() if name.startswith(f"{kind}/")}
