"""The state that the checkpoints of one rank's run hold: the components that keep it, and who writes what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.run.checkpoint.holders import ParameterHolders
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.stored import BY_RANK
from gossamer.run.checkpoint.writers import balanced
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.slices import NamedSlice
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The components of one rank's run that keep state, in the order in which they are restored."""

    components: tuple[Stateful, ...]
    members: Membership
    holders: ParameterHolders
    is_in_file: bool = False  # whether tensors are mapped from a file, of which no copy in memory is made

    def __post_init__(self) -> None:
        """Raise ValueError where two components have the same prefix."""
        prefixes = [prefix for one in self.components for prefix in one.prefixes]
        if len(set(prefixes)) != len(prefixes):
            raise ValueError(f"two components keep tensors of one prefix: {sorted(prefixes)}")

    def meta(self) -> Mapping[str, Any]:
        """Return the values to save beside the tensors."""
        found: dict[str, Any] = {}
        for component in self.components:
            found.update(component.meta())
        return {**found, **self.members.meta()}

    def pieces(self, writer: int, writers: int) -> list[NamedSlice]:
        """Return the slices that writer number `writer` of the `writers` on this host has to write.

        The writers of a host are consecutive ranks. Where not all ranks see one disk, none could hold all rows of a
        sharded tensor: each rank then stores its rows for itself.
        """
        rank = self.members.rank
        held = [one for component in self.components for one in component.slices()]
        replicated = [one for one in held if one.copies.is_replicated]
        shared, index, count = self.holders.division(replicated, rank, writer, writers)
        found = [shared[i].named for i in balanced(shared, index, count)]
        if writers < self.members.ranks:
            rows = [one for one in held if one.copies.is_sharded]
            found += [StateSlice.whole(BY_RANK + r.where.name, r.tensor, r.copies, rank).named for r in rows]
        else:
            found += [one.named for one in held if one.copies is SliceCopies.SHARDED]
        return found + [one.named for one in held if one.copies is SliceCopies.PRIVATE]

    def check(self, source: StateSource) -> None:
        """Check that `source` holds all that `restore` will read; nothing is changed.

        Raises CheckpointMismatch for other tensors, BadInput for a model with state that is not in tensors.
        """
        expected = {one.where.name: one.kind for component in self.components for one in component.wanted(source)}
        try:
            source.check_against(expected, elsewhere=self._is_elsewhere)
        except CheckpointMismatch:
            missing = frozenset(expected) - source.names()
            for why in (component.cause(source, missing) for component in self.components):
                if why:
                    raise CheckpointMismatch(why) from None
            raise
        for component in self.components:
            component.check(source)

    def restore(self, source: StateSource) -> str:
        """Restore all components in place; return a note for the user, "" for none.

        Raises what `check` raises, before anything is changed.
        """
        self.check(source)
        return "; ".join([note for component in self.components if (note := component.restore(source))])

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether a stored tensor need not be wanted by this rank, as its component says."""
        of = {prefix: one for one in self.components for prefix in one.prefixes if name.startswith(prefix)}
        return bool(of) and of[max(of, key=len)].ignores(name)
