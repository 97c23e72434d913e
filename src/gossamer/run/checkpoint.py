"""The tensors in a checkpoint of a run, and how to restore a trainer from them.

Names: "model/<parameter or buffer>", "optim/<slot>/<parameter>", "exchange/<path>@<parameter>" (one per rank),
"precision/<field>", "rng/torch" (one per rank). All tensors are keyed by canonical names, so a run with another number
of ranks or other split points reads the same file. Replicated tensors are written once: each rank of a host writes some
of them.

In local-update training, "model/<parameter>" holds the global parameters and "outer/..." the other state that all ranks
share; "island/..." and "optim/..." are one per rank. With sharded optimizer states each rank writes its rows of
"optim/...", with sharded parameters also its rows of "model/...". Where not all ranks see the same disk, each rank
writes its rows as "states/..." (one per rank). Where every island shards its own states, "optim/..." is one per island,
under the number of its first rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.run.goal import Progress
from gossamer.run.loss_scale import LossScale
from gossamer.run.staged_model import StagedModel
from gossamer.sharding import RowRange, ShardedOptimizer
from gossamer.spec.errors import BadInput, CheckpointMismatch, bad_input
from gossamer.store.checkpoint import Checkpoint, latest_good, list_checkpoints
from gossamer.store.slices import REPLICATED, NamedSlice, Slice
from gossamer.sync import GradientReducer, OuterLoop

_COMMON = "optim/common/"  # second moments averaged over islands: absent before the first average
_OF_ANY_RULE = frozenset({"main", "master", "common"})  # slots that any optimizer may have


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The tensors of one rank's run that its checkpoints hold."""

    module: nn.Module
    states: ShardedOptimizer
    replica: GradientReducer
    scaling: LossScale
    apart: OuterLoop
    progress: Progress
    cut: StagedModel | None = None  # with pipeline parallelism: the stages that the module holds

    @property
    def islands(self) -> list[list[int]]:
        """Return the ranks of every island in local-update training; an empty list in synchronous training."""
        return [list(island) for island in self.replica.levels.groups["island"]] if self.apart.fragments else []

    @property
    def _whose(self) -> int:
        """Return the replica number of sharded state: the island's first rank if islands have states of their own."""
        return next((island[0] for island in self.islands if self.replica.rank in island), REPLICATED)

    def replicated(self) -> dict[str, Tensor]:
        """Return the tensors that are the same on every rank that holds them."""
        found: dict[str, Tensor] = {}
        common = self.apart.common()
        sharded = self.states.sharded
        for name, tensor in named_state(self.module):
            if name not in sharded and (self.cut is None or name in self.cut.holds):
                found[f"model/{name}"] = common.get(name, tensor)
        if not common:
            found.update(self._slots())
        found.update({f"outer/{name}": tensor for name, tensor in self.apart.shared().items()})
        if not common:
            found.update({f"precision/{name}": tensor for name, tensor in self.scaling.state().items()})
        return found

    def private(self) -> dict[str, Tensor]:
        """Return the tensors that differ per rank: exchange state, random state, local state of local updates."""
        found = {f"exchange/{name}": tensor for name, tensor in self.replica.states().items()}
        found["rng/torch"] = torch.get_rng_state()
        if own := self.apart.own():
            found.update({f"island/{name}": tensor for name, tensor in own.items()})
            found.update({f"island/precision/{name}": tensor for name, tensor in self.scaling.state().items()})
            found["island/updates"] = torch.tensor(self.progress.updates)
            found.update(self._slots())
        return found

    def _slots(self) -> dict[str, Tensor]:
        """Return the optimizer states, if they are not sharded."""
        if self.states.is_sharded:
            return {}
        return {f"optim/{slot}/{param}": tensor for slot, param, _, tensor in self.states.slots()}

    def _sharded(self) -> list[NamedSlice]:
        """Return this rank's rows of sharded optimizer states and sharded parameters."""
        return self._slot_rows() + self._parameter_rows()

    def _slot_rows(self) -> list[NamedSlice]:
        slots = self.states.slots() if self.states.is_sharded else ()
        whose, params = self._whose, self.states.params
        return [_rows_of(f"optim/{slot}/{n}", params[n], rows, t, whose) for slot, n, rows, t in slots]

    def _parameter_rows(self) -> list[NamedSlice]:
        there = self.states.sharded.items()
        return [_rows_of(f"model/{name}", param, rows, t) for name, (param, rows, t) in there if rows.count]

    def pieces(self, writer: int, writers: int) -> list[NamedSlice]:
        """Return the slices that writer number `writer` of the `writers` on this host has to write.

        The writers of a host are consecutive ranks.
        """
        shared, all_here = list(self.replicated().items()), writers
        if self.cut is not None:
            shared, writer, writers = self._of_stage(self.cut, shared, writer, writers)
        kept = {f"model/{name}" for name, _ in self.module.named_buffers()}
        mine = [shared[i] for i in _balanced(shared, kept, writer, writers)]
        pieces = [(whole(name, tensor, -1), tensor) for name, tensor in mine]
        if all_here < self.replica.ranks:  # a disk that only some ranks see holds no tensor that all have parts of
            rows = [(whole(f"states/{of.name}", tensor, self.replica.rank), tensor) for of, tensor in self._sharded()]
        else:
            rows = [] if self.states.is_spare and not self.islands else self._slot_rows()
            rows += [] if self.states.has_spare_parameters else self._parameter_rows()
        return pieces + rows + [(whole(n, t, self.replica.rank), t) for n, t in self.private().items()]

    def _of_stage(
        self, cut: StagedModel, shared: list[tuple[str, Tensor]], writer: int, writers: int
    ) -> tuple[list[tuple[str, Tensor]], int, int]:
        """Return the tensors that the writers with this rank's stages divide, this rank's index among them, and their
        count.

        A tensor of several stages belongs to the first of these stages that has a writer on this host.
        """
        first = self.replica.rank - writer
        places = [cut.stages_at(rank % cut.ranks) for rank in range(first, first + writers)]
        mine = places[writer]
        leaders = {name: next(s for s in _stages_with(cut, _bare(name)) if s in places) for name, _ in shared}
        alike = [i for i, place in enumerate(places) if place == mine]
        return [(n, t) for n, t in shared if leaders[n] == mine], alike.index(writer), len(alike)

    def check(self, checkpoint: Checkpoint) -> None:
        """Check that `checkpoint` holds the tensors that `fill` will read.

        Raises CheckpointMismatch for other tensors, BadInput for a model with state that is not in tensors.
        """
        _check_plain(self.module)
        names = frozenset(checkpoint.names())
        apart = "states/model/" if self.states.is_sharded else "states/"
        if not self.states.sharded and any(name.startswith(apart) for name in names):
            raise CheckpointMismatch(
                f"{checkpoint.folder} holds sharded states rank by rank, as no disk saw all of them: resume with the "
                "plan.sharding that it was saved with"
            )
        expected = {n: (tuple(t.shape), str(t.dtype)) for n, t in self.replicated().items()}
        expected |= {of.name: (of.shape, str(tensor.dtype)) for of, tensor in self._sharded()}
        anew = {n for n in expected if f"states/{n}" in names or self._starts_anew(checkpoint, n)}
        expected = {n: kind for n, kind in expected.items() if n not in anew}
        everywhere = frozenset[str]() if self.cut is None else self.cut.names
        other_ways = ("outer/", "optim/main/", _COMMON, *(("optim/", "precision/") if self.apart.fragments else ()))
        if self.states.is_sharded:  # a parameter of few rows has its state on some ranks alone
            everywhere |= frozenset(self.states.params) | frozenset(self.states.sharded)
        try:
            checkpoint.check_against(
                expected, elsewhere=lambda name: _bare(name) in everywhere or name.startswith(other_ways)
            )
        except CheckpointMismatch:
            self._check_rule(checkpoint, names)
            raise

    def _check_rule(self, checkpoint: Checkpoint, names: Collection[str]) -> None:
        """Raise CheckpointMismatch if the optimizer, and not the model, differs from the one that was saved."""
        wanted = {slot for slot, *_ in self.states.slots()} - _OF_ANY_RULE
        stored = {name.split("/")[1] for name in names if name.startswith("optim/")} - _OF_ANY_RULE
        model = {name for name in self.replicated() if name.startswith("model/")}
        if wanted == stored or not model <= set(names):
            return
        raise CheckpointMismatch(
            f"{checkpoint.folder} was trained with another update rule: this one keeps {_slots_told(wanted)} of every "
            f"parameter, that one {_slots_told(stored)}. Resume with the train.optimizer that it was saved with, or "
            "export the model and begin a run from it"
        )

    def _starts_anew(self, checkpoint: Checkpoint, name: str) -> bool:
        """Return whether the replicated tensor `name` is not stored as such.

        The run was then trained in another mode (synchronous or local updates, replicated or sharded states), and
        continues from the tensors that are stored.
        """
        if name.startswith("outer/"):
            return not _was_apart(checkpoint)
        if name.startswith(("optim/main/", _COMMON, "precision/")):
            return not checkpoint.replicas(name)
        return name.startswith("optim/") and (_by_rank(checkpoint) or _was_apart(checkpoint))

    @torch.no_grad()
    def fill(self, checkpoint: Checkpoint, *, residuals: str = "redistribute") -> str:
        """Restore all tensors in place from a checkpoint that passed `check`; return a note for the user, "" for none.

        Exchange state and random state belong to a rank. With another number of ranks the random state starts anew, and
        `residuals` decides about exchange state: `merge` divides the sum of the former ranks' residuals evenly over the
        ranks, so that no residual is lost; `drop` starts with none.
        """
        for name, tensor in self.replicated().items():
            if name.startswith("optim/"):
                tensor.copy_(_agreed(checkpoint, _whole_of(name, tensor)))
            elif not self._starts_anew(checkpoint, name) and not name.startswith("precision/"):
                tensor.copy_(checkpoint.read(name))
        goes_on = self._goes_on(checkpoint)
        for of, tensor in self._sharded():
            tensor.copy_(self._rows(checkpoint, of, goes_on=goes_on))
        former, rank = int(checkpoint.meta["ranks"]), self.replica.rank
        self.scaling.load({n: _of_rank(checkpoint, f"precision/{n}", rank) for n in self.scaling.state()})
        told = self._fill_apart(checkpoint, residuals, goes_on=goes_on) if self.apart.fragments else ""
        if former == self.replica.ranks:
            torch.set_rng_state(checkpoint.read("rng/torch", replica=rank))
        names = list(self.replica.states())
        held = {n: checkpoint.replicas(f"exchange/{n}") for n in names}
        if former == self.replica.ranks and all(rank in replicas for replicas in held.values()):
            self.replica.restore({n: checkpoint.read(f"exchange/{n}", replica=rank) for n in names})
            return told
        there = former > 1 and all(replicas == tuple(range(former)) for replicas in held.values())
        if there and residuals == "redistribute":
            merged = {n: _merged(checkpoint, f"exchange/{n}", former, self.replica.ranks) for n in names}
            self.replica.restore(merged)
            return f"{told}resumed on {self.replica.ranks} ranks what {former} saved: exchange residuals were merged"
        why = "residuals: drop" if there else "not every rank's is stored here, or the exchange is another one"
        return f"{told}exchange residuals start anew ({why})" if names else told.removesuffix("; ")

    def _rows(self, checkpoint: Checkpoint, of: Slice, *, goes_on: bool) -> Tensor:
        """Return this rank's rows of a sharded tensor, in whichever form the checkpoint stores it."""
        by_rank = of.name.startswith("optim/") and _by_rank(checkpoint)
        if by_rank or f"states/{of.name}" in checkpoint.names():
            return self._of_this_rank(checkpoint, f"states/{of.name}")
        if of.name.startswith("optim/main/") and not checkpoint.replicas(of.name):  # equal to the parameter
            return dict(self.states.parameters())[of.name.removeprefix("optim/main/")]
        return self._kept(checkpoint, of, goes_on=goes_on)

    def _kept(self, checkpoint: Checkpoint, of: Slice, *, goes_on: bool) -> Tensor:
        """Return a slice of stored optimizer state: this island's own if islands continue, else the mean over all
        islands.
        """
        if not goes_on:
            return _agreed(checkpoint, of)
        return checkpoint.read(of.name, of.start, of.size, _speaker(checkpoint, of.name, self.replica.rank))

    def _of_this_rank(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """Return a tensor that was stored per rank, because no disk held all of it."""
        former, ranks, rank = int(checkpoint.meta["ranks"]), self.replica.ranks, self.replica.rank
        if former != ranks or rank not in checkpoint.replicas(name):
            raise CheckpointMismatch(
                f"{checkpoint.folder} holds the sharded state of ranks {list(checkpoint.replicas(name))} of {former}, "
                f"wanted rank {rank} of {ranks}: resume with as many ranks, each on the host where it was"
            )
        if not self._has_islands_of(checkpoint):
            raise CheckpointMismatch(
                f"{checkpoint.folder} holds the rows of each rank where islands apart were {checkpoint.meta['islands']}"
                f", wanted {self.islands}: resume with the same islands, and the plan.sync that it was saved with"
            )
        return checkpoint.read(name, replica=rank)

    def _has_islands_of(self, checkpoint: Checkpoint) -> bool:
        return bool(checkpoint.meta.get("islands", self.islands) == self.islands)

    def _goes_on(self, checkpoint: Checkpoint) -> bool:
        """Return whether local-update training continues with the same islands and all stored state of this rank's
        island.
        """
        if not self.apart.fragments or not _was_apart(checkpoint):
            return False
        same = int(checkpoint.meta["ranks"]) == self.replica.ranks and self._has_islands_of(checkpoint)
        return same and all(self.replica.rank in replicas for replicas in self._own_there(checkpoint).values())

    def _own_there(self, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        """Return the ranks whose local state of local-update training is stored, by tensor name."""
        under_way = (n.removeprefix("island/") for n in checkpoint.names() if n.startswith("island/left/"))
        return {n: checkpoint.replicas(f"island/{n}") for n in (*self.apart.own(), *under_way)}

    def _fill_apart(self, checkpoint: Checkpoint, residuals: str, *, goes_on: bool) -> str:
        """Restore the state of local-update training; return a note for the user.

        With other islands than before, all start from the global parameters and the mean of the optimizer states.
        """
        former, rank, ranks = int(checkpoint.meta["ranks"]), self.replica.rank, self.replica.ranks
        if not _was_apart(checkpoint):
            for name, tensor in self._slots().items():
                if not self._starts_anew(checkpoint, name):
                    tensor.copy_(checkpoint.read(name))
            self.apart.part()
            return "the islands part from what all ranks had trained together; "
        shared = {n.removeprefix("outer/"): checkpoint.read(n) for n in checkpoint.names() if n.startswith("outer/")}
        there = self._own_there(checkpoint)
        for name, tensor in self._slots().items():
            if checkpoint.replicas(name) or not name.startswith(_COMMON):
                tensor.copy_(self._kept(checkpoint, _whole_of(name, tensor), goes_on=goes_on))
        if goes_on:
            self.progress.updates = int(checkpoint.read("island/updates", replica=rank))
            self.apart.restore(shared, {n: checkpoint.read(f"island/{n}", replica=rank) for n in there})
            return ""
        owed = [n for n in there if n.startswith(("rounds/", "steps/")) and there[n] == tuple(range(former))]
        kept = {n: _merged(checkpoint, f"island/{n}", former, ranks) for n in owed if residuals == "redistribute"}
        self.apart.restore(shared, kept)
        return f"resumed on {ranks} ranks what {former} saved: all islands start from what they had agreed on; "


def _slots_told(slots: Collection[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"


@torch.no_grad()
def read_model(module: nn.Module, directory: Path) -> int:
    """Fill a module from the newest good checkpoint in `directory` and return its step.

    Raises CheckpointMismatch, or BadInput if there is no checkpoint yet.
    """
    if not list_checkpoints(directory):
        raise BadInput(f"{directory} holds no checkpoint yet: let the run go on to its first one")
    checkpoint, _ = latest_good(directory)
    if any(name.startswith("states/model/") for name in checkpoint.names()):
        raise CheckpointMismatch(
            f"{checkpoint.folder} holds sharded parameters rank by rank, as no disk saw all of them: resume the run "
            "where it was, on a disk that all ranks see, or with plan.sharding zero2 from its start"
        )
    for name, tensor in named_state(module):
        tensor.copy_(checkpoint.read(f"model/{name}"))
    return int(checkpoint.meta["step"])


def whole(name: str, tensor: Tensor, replica: int) -> Slice:
    """Return the slice that covers all of a tensor."""
    shape = tuple(tensor.shape)
    return Slice(name, shape, (0,) * len(shape), shape, replica)


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters (tied ones once, under their first name) and persistent buffers, by name."""
    yield from module.named_parameters()
    persistent = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def _check_plain(module: nn.Module) -> None:
    """Raise BadInput for a module whose state_dict has more than tensors, which a checkpoint cannot hold."""
    for path, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            raise bad_input(
                wanted="a model whose state is its parameters and buffers, to go on from a checkpoint",
                got=f"{path or 'the model'} ({type(inner).__name__}) with get_extra_state, which no checkpoint keeps",
                do="keep that in a buffer, or train without a break",
                key="model",
            )


def trainable(module: nn.Module) -> Mapping[str, Tensor]:
    """Return the parameters that require a gradient, by canonical name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _whole_of(name: str, tensor: Tensor) -> Slice:
    return Slice.whole(name, tuple(tensor.shape))


def _was_apart(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is of local-update training."""
    return "outer/counts/0" in checkpoint.names()


def _agreed(checkpoint: Checkpoint, of: Slice) -> Tensor:
    """Return a slice of optimizer state: the stored one if all ranks shared it, else the mean over islands, weighted by
    ranks.
    """
    ranks = [r for r in checkpoint.replicas(of.name) if r != REPLICATED]
    if not ranks:
        return checkpoint.read(of.name, of.start, of.size)
    speakers = [_speaker(checkpoint, of.name, rank) for rank in range(int(checkpoint.meta["ranks"]))]
    if not set(speakers) <= set(ranks):  # a mean over these would be another one on each disk
        raise CheckpointMismatch(
            f"{checkpoint.folder} holds {of.name} of ranks {ranks} of {checkpoint.meta['ranks']}, wanted all of them: "
            "copy the hosts' checkpoints together, or resume with as many ranks, each on the host where it was"
        )
    held = {one: checkpoint.read(of.name, of.start, of.size, one).double() for one in set(speakers)}
    return torch.stack([held[one] for one in speakers]).mean(0)


def _speaker(checkpoint: Checkpoint, name: str, rank: int) -> int:
    """Return the replica number under which a rank's optimizer state is stored: its own or its island's."""
    if rank in checkpoint.replicas(name):
        return rank
    return next((island[0] for island in checkpoint.meta.get("islands", ()) if rank in island), rank)


def _of_rank(checkpoint: Checkpoint, name: str, rank: int) -> Tensor:
    """Return a tensor that all ranks shared, or this rank's own from local-update training, or another rank's if it had
    none.
    """
    if checkpoint.replicas(name):
        return checkpoint.read(name)
    there = checkpoint.replicas(f"island/{name}")
    return checkpoint.read(f"island/{name}", replica=rank if rank in there else there[0])


def _by_rank(checkpoint: Checkpoint) -> bool:
    """Return whether sharded state is stored per rank, and not under the names of the full tensors."""
    return any(name.startswith("states/") for name in checkpoint.names())


def _rows_of(name: str, whole: Tensor, rows: RowRange, tensor: Tensor, replica: int = REPLICATED) -> NamedSlice:
    """Return a slice of some rows of a tensor with the shape of a parameter."""
    shape = tuple(whole.shape)
    start = (rows.start, *(0 for _ in shape[1:])) if shape else ()
    return Slice(name, shape, start, tuple(tensor.shape), replica), tensor


def _stages_with(cut: StagedModel, name: str) -> Iterator[tuple[int, ...]]:
    """Yield the sets of stages that lie on the same ranks as each holder of a tensor."""
    return (cut.stages_at(group[0]) for group in cut.holders(name))


def _bare(name: str) -> str:
    """Return the parameter name in "model/<name>" or "optim/<slot>/<name>"."""
    room, _, rest = name.partition("/")
    return rest.partition("/")[2] if room == "optim" else rest


def _merged(checkpoint: Checkpoint, name: str, former: int, ranks: int) -> Tensor:
    """Return the state that each of `ranks` ranks gets from the states of `former` ranks.

    Residuals are parts of one sum and are divided evenly. A tensor that was the same on all ranks (a low-rank factor,
    an estimate of the mean, a counter) stays as it is.
    """
    held = [checkpoint.read(name, replica=r) for r in range(former)]
    if all(torch.equal(one, held[0]) for one in held):
        return held[0]
    return torch.stack(held).sum(0) / ranks if held[0].is_floating_point() else held[0]


def _balanced(shared: list[tuple[str, Tensor]], kept: Set[str], writer: int, writers: int) -> list[int]:
    """Return the indices of the tensors that `writer` writes, so that all write about as many bytes; the same on every
    rank.

    `kept`: buffers, which each replica computes from its own batches. The first writer writes all of them, because the
    mean of one replica and the variance of another do not belong together.
    """
    loads = [sum(tensor.nbytes for name, tensor in shared if name in kept), *[0] * (writers - 1)]
    mine = [i for i, (name, _) in enumerate(shared) if name in kept and not writer]
    largest_first = sorted(range(len(shared)), key=lambda i: (-shared[i][1].nbytes, i))
    for index in (i for i in largest_first if shared[i][0] not in kept):
        least = loads.index(min(loads))
        loads[least] += shared[index][1].nbytes
        if least == writer:
            mine.append(index)
    return sorted(mine)


__all__ = ["CheckpointContents", "named_state", "read_model", "trainable", "whole"]
