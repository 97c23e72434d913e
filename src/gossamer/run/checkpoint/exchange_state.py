"""The state of gradient exchanges in a checkpoint, such as residuals: "exchange/<path>@<parameter>", one per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.stored import merged
from gossamer.spec.row_range import RowRange, whole_of
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource
from gossamer.sync import GradientReducer


@dataclass(frozen=True, slots=True)
class SavedExchanges(Stateful):
    """The state of the exchanges of one rank's gradients.

    `residuals`: with another number of ranks, `redistribute` divides the sum of the former ranks' residuals evenly over
    the ranks, so that no residual is lost; `reset` starts with none.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("exchange/",)

    replica: GradientReducer
    members: Membership
    residuals: str

    def slices(self) -> Iterator[StateSlice]:
        for name, tensor in self.replica.states().items():
            yield StateSlice.whole(f"exchange/{name}", tensor, SliceCopies.PRIVATE, self.members.rank)

    def check(self, source: StateSource) -> None:
        """Check nothing: state that is not there, or of another exchange, starts anew."""

    @torch.no_grad()
    def restore(self, source: StateSource) -> str:
        former, rank, ranks = int(source.meta["ranks"]), self.members.rank, self.members.ranks
        now = self.replica.states()
        held = {n: source.versions(f"exchange/{n}") for n in now}
        divided = {whole_of(n) for n in source.names()} - source.names()
        anew = {n: t for n, t in now.items() if not held[n] and (f"exchange/{n}" in divided or RowRange.read(n))}
        names = [n for n in now if n not in anew]  # what is kept of each row is there, whatever the parts were
        held = {n: held[n] for n in names}
        if former == ranks and all(rank in versions for versions in held.values()):
            self.replica.restore({**anew, **{n: source.read_whole(f"exchange/{n}", rank) for n in names}})
            return ""
        there = former > 1 and all(versions == tuple(range(former)) for versions in held.values())
        if there and self.residuals == "redistribute":
            self.replica.restore({**anew, **{n: merged(source, f"exchange/{n}", former, ranks) for n in names}})
            return f"resumed on {ranks} ranks a checkpoint of {former} ranks: exchange residuals were merged"
        why = "residuals_on_resume reset" if there else "not stored here for every rank, or of another exchange"
        return f"exchange residuals start anew ({why})" if names else ""
