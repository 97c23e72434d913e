"""The optimizer states in a checkpoint: "optim/<slot>/<parameter>", whole or in rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.optimizer import is_coded
from gossamer.run.checkpoint.average import AVERAGE
from gossamer.run.checkpoint.holders import ParameterHolders, bare
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.outer_loop_state import OuterLoopState
from gossamer.run.checkpoint.slices import row_slice
from gossamer.run.checkpoint.stored import (
    BY_RANK,
    agreed,
    check_agreed,
    holds_under,
    other_sharding,
    speaker,
    was_apart,
)
from gossamer.sharding import ShardedOptimizer
from gossamer.spec.errors import CheckpointMismatch
from gossamer.spec.method_config import Written
from gossamer.store.slices import REPLICATED
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource

_MAIN = "optim/main/"  # equal to the parameters where it is absent
_COMMON = "optim/common/"  # second moments averaged over islands: absent before the first average
_RULE = "rule"  # in the metadata: the optimizer that the states belong to
_ANOTHER_RULE = "Resume with the train.optimizer of the checkpoint, or export the model and start a run from the export"
_OF_ANY_RULE = frozenset({"main", "master", "common"})  # slots that any optimizer may have


@dataclass(frozen=True, slots=True)
class OptimizerSlots(Stateful):
    """The optimizer states that one rank holds, and the number of updates that its parameters have missed.

    `written`: the optimizer as the configuration names it. It is saved where the model of a checkpoint is not at its
    parameters but at the optimizer's averaged point (see `average`).
    """

    prefixes: ClassVar[tuple[str, ...]] = ("optim/",)

    states: ShardedOptimizer
    holders: ParameterHolders
    members: Membership
    outer: OuterLoopState
    written: Written

    def slices(self) -> Iterator[StateSlice]:
        for slot, param, rows, tensor in self.states.slots():
            name = f"optim/{slot}/{param}"
            if self.states.is_sharded:
                copies = SliceCopies.SPARE if self.states.is_spare and not self.outer.is_apart else SliceCopies.SHARDED
                if not tensor.dim() and not rows.count:
                    continue  # one number for the whole parameter, which another rank owns
                where = row_slice(name, self.states.params[param], rows, tensor, self.members.version_of_shards)
                yield StateSlice(where, tensor, copies)
            elif self.outer.is_apart:
                yield StateSlice.whole(name, tensor, SliceCopies.PRIVATE, self.members.rank)
            else:
                yield StateSlice.whole(name, tensor, SliceCopies.REPLICATED)

    def meta(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {"skipped": dict(self.states.skipped), _RULE: self.states.rule.made_by}
        return {**found, AVERAGE: self.written} if self.states.rule.has_average else found

    def wanted(self, source: StateSource) -> Iterator[StateSlice]:
        """Yield the slices that a run in the same mode has stored; one in another continues from what is there."""
        is_other = holds_under(source, BY_RANK) or was_apart(source)
        for one in self.slices():
            name = one.where.name
            is_absent = REPLICATED not in source.versions(name) if name.startswith((_MAIN, _COMMON)) else is_other
            if one.copies is not SliceCopies.PRIVATE and not is_absent:
                yield one

    def ignores(self, name: str) -> bool:
        param = bare(name)
        is_rows = self.states.is_sharded and (param in self.states.params or param in self.states.sharded)
        is_other_mode = self.outer.is_apart or name.startswith((_MAIN, _COMMON))
        return is_rows or is_other_mode or param in self.holders.elsewhere

    def cause(self, source: StateSource, missing: frozenset[str]) -> str:
        """Return that the optimizer is another one than the one saved, if the weights are the same."""
        if any(name.startswith("model/") for name in missing):
            return ""
        if other := self._other_rule(source):
            return other
        wanted = {slot for slot, *_ in self.states.slots()} - _OF_ANY_RULE
        stored = {name.split("/")[1] for name in source.names() if name.startswith("optim/")} - _OF_ANY_RULE
        if wanted == stored:
            return ""
        return (
            f"{source.label} was trained with another optimizer: this run's keeps {_slots_told(wanted)} for every "
            f"parameter, the saved one {_slots_told(stored)}. {_ANOTHER_RULE}"
        )

    def check(self, source: StateSource) -> None:
        is_by_rank, goes_on = holds_under(source, BY_RANK), self.outer.goes_on(source)
        if other := self._other_rule(source):
            raise CheckpointMismatch(other)
        if is_by_rank and not self.states.is_sharded:
            raise CheckpointMismatch(other_sharding(source))
        for one in self.slices():
            if is_by_rank:
                self.members.check_own(source, BY_RANK + one.where.name)
            elif not self._starts_anew(source, one):
                self._check_stored(source, one, goes_on=goes_on)

    def _other_rule(self, source: StateSource) -> str:
        """Return that the saved states are another optimizer's, even if its slots have the same names; "" if not."""
        mine, saved = self.states.rule.made_by, source.meta.get(_RULE)
        if saved in (None, mine):  # None: saved by a version that did not say it
            return ""
        return (
            f"{source.label} was trained with another optimizer: this run's is {mine}, the saved one {saved}. "
            f"{_ANOTHER_RULE}"
        )

    def _check_stored(self, source: StateSource, one: StateSlice, *, goes_on: bool) -> None:
        name = one.where.name
        if not source.versions(name) and (why := self.cause(source, frozenset())):
            raise CheckpointMismatch(why)
        if not goes_on or not source.versions(name):
            check_agreed(source, name)
            self._check_code(source, one)
        elif (version := speaker(source, name, self.members.rank)) not in source.versions(name):
            raise CheckpointMismatch(
                f"{source.label} holds {name} of ranks {list(source.versions(name))}, wanted rank {version}: resume "
                "each rank on the host where it ran before"
            )

    def _check_code(self, source: StateSource, one: StateSlice) -> None:
        """Raise CheckpointMismatch for a state in a code of which islands hold several: they have no mean."""
        name = one.where.name
        if is_coded({name: one.tensor}) and set(source.versions(name)) != {REPLICATED}:
            raise CheckpointMismatch(
                f"{source.label} holds {name} of islands that trained apart, in a code of 8 bits, which cannot be "
                "averaged: resume with the plan.sync and the islands that it was saved with"
            )

    @torch.no_grad()
    def restore(self, source: StateSource) -> str:
        self.states.skipped.update(source.meta.get("skipped", {}))
        is_by_rank, goes_on = holds_under(source, BY_RANK), self.outer.goes_on(source)
        for one in self.slices():
            if is_by_rank:
                one.tensor.copy_(self.members.own(source, BY_RANK + one.where.name))
            elif self._starts_anew(source, one):
                self._begin(one)
            else:
                one.tensor.copy_(self._stored(source, one, goes_on=goes_on))
        return ""

    def _starts_anew(self, source: StateSource, one: StateSlice) -> bool:
        """Return whether the slice has a value without being stored."""
        return one.where.name.startswith((_MAIN, _COMMON)) and not source.versions(one.where.name)

    def _begin(self, one: StateSlice) -> None:
        """Set a slice that is not stored: float32 copies equal the parameters, other states stay as they are."""
        if one.where.name.startswith(_MAIN):
            one.tensor.copy_(dict(self.states.parameters())[one.where.name.removeprefix(_MAIN)])

    def _stored(self, source: StateSource, one: StateSlice, *, goes_on: bool) -> Tensor:
        """Return a stored slice: this island's own if islands continue, else the mean over all islands."""
        if not goes_on:
            return agreed(source, one.where)
        return source.read(replace(one.where, replica=speaker(source, one.where.name, self.members.rank)))


def _slots_told(slots: Collection[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"
