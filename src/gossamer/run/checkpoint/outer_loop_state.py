"""The state of local-update training in a checkpoint: "outer/..." of all ranks, "island/..." of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gossamer.exchange import is_residual
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.stored import merged, was_apart
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.slices import REPLICATED
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource
from gossamer.sync import OuterLoop

_AS_SAVED = (
    "resume with the method that it was saved with, or with `plan: {sync: every_step}` from its global parameters"
)


@dataclass(frozen=True, slots=True)
class OuterLoopState(Stateful):
    """The state of one rank's outer loop; empty in synchronous training. The global parameters are the weights'.

    `residuals`: with other islands than before, `redistribute` divides the sum of the former ranks' residuals evenly
    over the ranks, `reset` starts with none.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("outer/", "island/")

    apart: OuterLoop
    members: Membership
    residuals: str

    @property
    def is_apart(self) -> bool:
        """Whether there is an outer loop, so that islands have states of their own."""
        return bool(self.apart.fragments)

    def slices(self) -> Iterator[StateSlice]:
        for name, tensor in self.apart.shared().items():
            yield StateSlice.whole(f"outer/{name}", tensor, SliceCopies.REPLICATED)
        for name, tensor in self.apart.own().items():
            yield StateSlice.whole(f"island/{name}", tensor, SliceCopies.PRIVATE, self.members.rank)

    def wanted(self, source: StateSource) -> Iterator[StateSlice]:
        return (one for one in self.slices() if one.copies is SliceCopies.REPLICATED and was_apart(source))

    def ignores(self, name: str) -> bool:
        return name.startswith("outer/")

    def goes_on(self, source: StateSource) -> bool:
        """Return whether local-update training continues with the same islands and all stored state of this rank's
        island.
        """
        if not self.is_apart or not was_apart(source):
            return False
        same = self.members.has_ranks_of(source) and self.members.has_islands_of(source)
        return same and all(self.members.rank in versions for versions in self._own_there(source).values())

    def _own_there(self, source: StateSource) -> dict[str, tuple[int, ...]]:
        """Return the ranks whose local state of local-update training is stored, by tensor name."""
        under_way = (n.removeprefix("island/") for n in sorted(source.names()) if n.startswith("island/left/"))
        return {n: source.versions(f"island/{n}") for n in (*self.apart.own(), *under_way)}

    def cause(self, source: StateSource, missing: frozenset[str]) -> str:
        """Return that the outer loop is another one than the one saved, if that is why tensors are missing."""
        lacks = any(name.startswith("outer/") for name in missing)
        return self._other_fragments(source) or (f"{_other_loop(source)}, {_AS_SAVED}" if lacks else "")

    def check(self, source: StateSource) -> None:
        """Check that the model is divided into fragments as it was: their rounds are counted one by one.

        Local state that is not there starts from the global parameters.
        """
        if why := self._other_fragments(source):
            raise CheckpointMismatch(why)

    def _other_fragments(self, source: StateSource) -> str:
        """Return that the stored fragments are more or fewer than those of this run, "" if they are as many."""
        there, here = sum(n.startswith("outer/counts/") for n in source.names()), len(self.apart.fragments)
        if not (self.is_apart and was_apart(source)) or there == here:
            return ""
        return f"{_other_loop(source)}: wanted {there} in plan.sync.fragments, got {here}; {_AS_SAVED}"

    @torch.no_grad()
    def restore(self, source: StateSource) -> str:
        """Restore the outer loop, once the global parameters and the optimizer states are restored.

        With other islands than before, all start from the global parameters and the mean of the optimizer states.
        """
        if not self.is_apart:
            left = "what islands have made since their last round, and the state of the outer loop, is left"
            return f"synchronous steps go on from the global parameters: {left}" if was_apart(source) else ""
        former, rank, ranks = int(source.meta["ranks"]), self.members.rank, self.members.ranks
        if not was_apart(source):
            self.apart.part()
            return "local updates start from the parameters of the synchronous steps before"
        names = sorted(n for n in source.names() if n.startswith("outer/") and REPLICATED in source.versions(n))
        shared = {n.removeprefix("outer/"): source.read_whole(n) for n in names}
        there = self._own_there(source)
        if self.goes_on(source):
            self.apart.restore(shared, {n: source.read_whole(f"island/{n}", rank) for n in there})
            return self._begun_anew(source, there)
        owed = self._residuals_there(there, former) if self.residuals == "redistribute" else []
        self.apart.restore(shared, {n: merged(source, f"island/{n}", former, ranks) for n in owed})
        said = f"resumed on {ranks} ranks a checkpoint of {former} ranks: all islands start from its global parameters"
        return "; ".join(one for one in (said, self._begun_anew(source, owed)) if one)

    def _begun_anew(self, source: StateSource, taken: Collection[str]) -> str:
        """Return a note on stored residuals of which nothing goes on, "" for none."""
        stored = (name.removeprefix("island/") for name in source.names() if name.startswith("island/"))
        count = sum(is_residual(name) and name not in taken for name in stored)
        return f"exchange residuals between islands start anew ({count} tensors)" if count else ""

    def _residuals_there(self, there: Mapping[str, tuple[int, ...]], former: int) -> list[str]:
        """Return the states of exchanges of which all ranks' are stored; of one kind all of them, or none."""
        found: list[str] = []
        for kind in ("rounds/", "steps/"):
            names = [name for name in there if name.startswith(kind)]
            found += names if all(there[name] == tuple(range(former)) for name in names) else []
        return found


def _other_loop(source: StateSource) -> str:
    return f"{source.label} was saved with other settings of plan.sync"
