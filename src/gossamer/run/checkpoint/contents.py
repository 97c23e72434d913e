"""All tensors that the checkpoints of one rank's run hold, and how to restore a trainer from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.run.checkpoint.exchange_state import SavedExchanges
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.optimizer_state import OptimizerSlots
from gossamer.run.checkpoint.outer_state import OuterState
from gossamer.run.checkpoint.slices import whole
from gossamer.run.checkpoint.stored import COMMON, of_rank, starts_anew
from gossamer.run.checkpoint.weights import Weights, check_plain
from gossamer.run.checkpoint.writers import balanced, bare, of_stage
from gossamer.run.loss_scale import LossScale
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import Checkpoint
from gossamer.store.slices import NamedSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """The tensors of one rank's run that its checkpoints hold, by their owners."""

    weights: Weights
    slots: OptimizerSlots
    exchange: SavedExchanges
    outer: OuterState
    scaling: LossScale
    members: Membership

    @property
    def islands(self) -> list[list[int]]:
        """Return the ranks of every island in local-update training; an empty list in synchronous training."""
        return self.members.islands

    @property
    def skipped(self) -> dict[str, int]:
        """Return the number of updates without its gradient, by parameter: a part of the metadata."""
        return self.slots.states.skipped

    def replicated(self) -> dict[str, Tensor]:
        """Return the tensors that are the same on every rank that holds them."""
        common = self.outer.apart.common()
        found = self.weights.replicated(common)
        if not common:
            found.update(self.slots.tensors())
        found.update(self.outer.shared())
        if not common:
            found.update({f"precision/{name}": tensor for name, tensor in self.scaling.state().items()})
        return found

    def private(self) -> dict[str, Tensor]:
        """Return the tensors that differ per rank: exchange state, random state, local state of local updates."""
        found = self.exchange.tensors()
        found["rng/torch"] = torch.get_rng_state()
        if own := self.outer.own():
            found.update(own)
            found.update({f"island/precision/{name}": tensor for name, tensor in self.scaling.state().items()})
            found.update(self.outer.updates())
            found.update(self.slots.tensors())
        return found

    def _sharded(self) -> list[NamedSlice]:
        """Return this rank's rows of sharded optimizer states and sharded parameters."""
        return self.slots.rows() + self.weights.rows()

    def pieces(self, writer: int, writers: int) -> list[NamedSlice]:
        """Return the slices that writer number `writer` of the `writers` on this host has to write.

        The writers of a host are consecutive ranks.
        """
        shared, all_here, rank = list(self.replicated().items()), writers, self.members.rank
        cut, states = self.weights.cut, self.slots.states
        if cut is not None:
            shared, writer, writers = of_stage(cut, rank, shared, writer, writers)
        mine = [shared[i] for i in balanced(shared, self.weights.buffers(), writer, writers)]
        pieces = [(whole(name, tensor, -1), tensor) for name, tensor in mine]
        if all_here < self.members.ranks:  # a disk that only some ranks see holds no tensor that all have parts of
            rows = [(whole(f"states/{of.name}", tensor, rank), tensor) for of, tensor in self._sharded()]
        else:
            rows = [] if states.is_spare and not self.islands else self.slots.rows()
            rows += [] if states.has_spare_parameters else self.weights.rows()
        return pieces + rows + [(whole(n, t, rank), t) for n, t in self.private().items()]

    def check(self, checkpoint: Checkpoint) -> None:
        """Check that `checkpoint` holds the tensors that `fill` will read.

        Raises CheckpointMismatch for other tensors, BadInput for a model with state that is not in tensors.
        """
        check_plain(self.weights.module)
        names, states = frozenset(checkpoint.names()), self.slots.states
        apart = "states/model/" if states.is_sharded else "states/"
        if not states.sharded and any(name.startswith(apart) for name in names):
            raise CheckpointMismatch(
                f"{checkpoint.folder} holds sharded states rank by rank, as no disk saw all of them: resume with the "
                "plan.sharding that it was saved with"
            )
        expected = {n: (tuple(t.shape), str(t.dtype)) for n, t in self.replicated().items()}
        expected |= {of.name: (of.shape, str(tensor.dtype)) for of, tensor in self._sharded()}
        anew = {n for n in expected if f"states/{n}" in names or starts_anew(checkpoint, n)}
        expected = {n: kind for n, kind in expected.items() if n not in anew}
        elsewhere, other_ways = self._names_elsewhere(), self._names_of_other_ways()
        try:
            checkpoint.check_against(
                expected, elsewhere=lambda name: bare(name) in elsewhere or name.startswith(other_ways)
            )
        except CheckpointMismatch:
            self.slots.check_rule(checkpoint, names, [n for n in self.replicated() if n.startswith("model/")])
            raise

    def _names_elsewhere(self) -> frozenset[str]:
        """Return the parameters and buffers that other ranks may hold."""
        cut, states = self.weights.cut, self.slots.states
        names = frozenset[str]() if cut is None else cut.names
        if states.is_sharded:  # a parameter of few rows has its state on some ranks alone
            names |= frozenset(states.params) | frozenset(states.sharded)
        return names

    def _names_of_other_ways(self) -> tuple[str, ...]:
        """Return the prefixes of tensors that a run in another mode has, and this one need not read."""
        return ("outer/", "optim/main/", COMMON, *(("optim/", "precision/") if self.outer.apart.fragments else ()))

    @torch.no_grad()
    def fill(self, checkpoint: Checkpoint, *, residuals: str = "redistribute") -> str:
        """Restore all tensors in place from a checkpoint that passed `check`; return a note for the user, "" for none.

        Exchange state and random state belong to a rank. With another number of ranks the random state starts anew, and
        `residuals` decides about exchange state: `redistribute` divides the sum of the former ranks' residuals evenly
        over the ranks, so that no residual is lost; `reset` starts with none.
        """
        common, rank = self.outer.apart.common(), self.members.rank
        self.weights.restore(checkpoint, common)
        if not common:
            self.slots.restore_shared(checkpoint)
        self.outer.restore_shared(checkpoint)
        goes_on = self.outer.goes_on(checkpoint)
        for of, tensor in self._sharded():
            tensor.copy_(self.slots.read_rows(checkpoint, of, goes_on=goes_on))
        self.scaling.load({n: of_rank(checkpoint, f"precision/{n}", rank) for n in self.scaling.state()})
        told = self.outer.restore(checkpoint, self.slots, residuals, goes_on=goes_on)
        same_ranks = self.members.has_ranks_of(checkpoint)
        if same_ranks:
            torch.set_rng_state(checkpoint.read("rng/torch", replica=rank))
        said = self.exchange.restore(checkpoint, residuals)
        return f"{told}{said}" if said or same_ranks else told.removesuffix("; ")
