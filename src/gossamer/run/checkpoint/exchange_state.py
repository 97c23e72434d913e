"""The state of gradient exchanges in a checkpoint, such as residuals: "exchange/<path>@<parameter>", one per rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.exchange import is_residual
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.stored import merged
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import CheckpointSource, list_checkpoints, open_checkpoint
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource
from gossamer.sync import GradientReducer

_PREFIX = "exchange/"
_ISLANDS = "islands"  # in which one rank keeps a state for all of its own
_GROUPS = "groups"  # of ranks that average their gradients, and hold what they know of the mean alike
_OF_RANKS = (_ISLANDS, _GROUPS)


@dataclass(frozen=True, slots=True)
class SavedExchanges(Stateful):
    """The state of the exchanges of one rank's gradients.

    `residuals`: with another number of ranks, `redistribute` divides the sum of the former ranks' residuals evenly over
    the ranks, so that no residual is lost; `reset` starts with none. What another exchange keeps starts anew, but for
    residuals: they go on in whatever error feedback their parameter has now. What one rank of an island keeps for all
    of it starts anew on other islands. All that is no residual goes on where every rank of the mean has it and the same
    ranks averaged it before, else it starts anew on all of them: ranks that hold it unlike would never agree on a mean.
    """

    prefixes: ClassVar[tuple[str, ...]] = (_PREFIX,)

    replica: GradientReducer
    members: Membership
    residuals: str

    def slices(self) -> Iterator[StateSlice]:
        held = self.replica.states()
        if self.replica.kept_by_owners():
            held[_ISLANDS] = self._numbers("island")
        if not all(map(is_residual, held)):
            held[_GROUPS] = self._numbers(self.replica.meets)
        for name, tensor in held.items():
            yield StateSlice.whole(_PREFIX + name, tensor, SliceCopies.PRIVATE, self.members.rank)

    def _numbers(self, level: str) -> Tensor:
        """Return the number of every rank's group at `level`, (ranks,); -1 of a rank that is in none."""
        groups = self.replica.levels.groups.get(level, ())
        return torch.tensor([next((i for i, g in enumerate(groups) if r in g), -1) for r in range(self.members.ranks)])

    def check(self, source: StateSource) -> None:
        """Check nothing: state that is not there, or of another exchange, starts anew."""

    @torch.no_grad()
    def restore(self, source: StateSource) -> str:
        former, ranks = int(source.meta["ranks"]), self.members.ranks
        now, stored = self.replica.states(), _stored(source)
        owed = [name for name in stored if is_residual(name)]
        if former != ranks and self.residuals == "reset":
            return f"exchange residuals start anew (residuals_on_resume {self.residuals})" if now or owed else ""
        owners = frozenset(self.replica.kept_by_owners())
        if owners and former == ranks and _PREFIX + _ISLANDS in source.names():
            then = self._read(source, _ISLANDS, former)
            owners = frozenset() if then is not None and torch.equal(then, self._numbers("island")) else owners
        asked = [n for n in stored if is_residual(n) or (n in now and (former == ranks or former > 1))]
        asked = [n for n in asked if n not in owners]
        there = {name: tensor for name in asked if (tensor := self._read(source, name, former)) is not None}
        unlike = self._unlike(source, stored, there)
        there = {name: tensor for name, tensor in there.items() if name not in unlike}
        self.replica.restore(there)
        kept = {_param(name) for name in now if is_residual(name)}
        told = [f"resumed on {ranks} ranks a checkpoint of {former} ranks: exchange residuals were merged"]
        if former == ranks or not there:
            told = []
        if absent := [name for name in owed if name not in there]:
            told.append(f"exchange residuals of {_some(absent)} start anew: not stored here for every rank")
        if lost := [name for name in owed if _param(name) not in kept and name in there and there[name].any()]:
            told.append(
                f"exchange residuals of {_some(lost)} were dropped: the exchange there has no error feedback now"
            )
        if anew := [name for name in stored if name in owners]:
            told.append(f"what exchanges between islands kept of {_some(anew)} starts anew, on other islands")
        if anew := [name for name in unlike if name not in owners]:
            told.append(
                f"what exchanges know of the mean of {_some(anew)} starts anew on all ranks: "
                "other ranks averaged it before, not every rank has it stored, or an earlier version saved it"
            )
        return "; ".join(told)

    def _unlike(self, source: StateSource, stored: Collection[str], there: Collection[str]) -> list[str]:
        """Return the stored states that cannot go on, residuals left out; the same on all ranks of a mean.

        These must all call it: each sees its own disk. `there`: the states that this rank could go on with.
        """
        names = [name for name in self.replica.states() if not is_residual(name)]
        if not names:
            return []
        able = there if self._has_groups_of(source) else ()
        mine = tuple(float(name in stored) + float(name in able) for name in names)
        ranks = self.replica.gather(mine, "all")  # (ranks, names)
        anew = (ranks.amax(0) > 0) & (ranks.amin(0) < 2)
        return [name for name, is_anew in zip(names, anew.tolist(), strict=True) if is_anew]

    def _has_groups_of(self, source: StateSource) -> bool:
        """Return whether gradients were averaged by the same groups of ranks; of other ranks, by one group of all."""
        versions, now = source.versions(_PREFIX + _GROUPS), self._numbers(self.replica.meets)
        if not versions:
            return False
        then = source.read_whole(_PREFIX + _GROUPS, versions[0])
        return torch.equal(then, now) or (len(then) != len(now) and not then.any() and not now.any())

    def _read(self, source: StateSource, name: str, former: int) -> Tensor | None:
        """Return what this rank gets of a stored state; None where that of a rank is not there."""
        rank, ranks, versions = self.members.rank, self.members.ranks, source.versions(_PREFIX + name)
        if former == ranks:
            return source.read_whole(_PREFIX + name, rank) if rank in versions else None
        return merged(source, _PREFIX + name, former, ranks) if versions == tuple(range(former)) else None


def owing_in(directory: Path, until: int = -1) -> frozenset[str]:
    """Return the parameters with a residual in the newest checkpoint here whose manifest can be read; data is not read.

    `until`: the newest step to look at; -1: any.
    """
    for step in reversed(list_checkpoints(directory)):
        if until >= 0 and step > until:
            continue
        try:
            names = CheckpointSource(open_checkpoint(directory, step)).names()
        except CheckpointMismatch:
            continue
        own = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
        return frozenset(_param(name) for name in own if is_residual(name))
    return frozenset()


def _stored(source: StateSource) -> list[str]:
    names = (name.removeprefix(_PREFIX) for name in source.names() if name.startswith(_PREFIX))
    return sorted(name for name in names if name not in _OF_RANKS)


def _param(name: str) -> str:
    return name.partition("@")[2]


def _some(names: Sequence[str]) -> str:
    params = sorted({_param(name) for name in names})
    shown = ", ".join(params[:3]) + (", ..." if len(params) > 3 else "")
    return f"{len(params)} parameter{'s' if len(params) > 1 else ''} ({shown})"
