"""What a checkpoint of a run holds, and how a trainer is filled from one.

Names: "model/<parameter or buffer>", "optim/<slot>/<parameter>", "exchange/<path>@<parameter>" (one per rank),
"precision/<field>", "rng/torch" (one per rank). Everything is keyed by canonical names, so another number of ranks or
another cut reads the same file. Replicated tensors are written once: each rank of a host writes its part of them.
Of islands that train apart, "model/<parameter>" is what they agree on and "outer/..." what else they share;
"island/..." and "optim/..." are one per rank. Of sharded states each rank writes its rows of "optim/...", of sharded
parameters those of "model/..." too, or, where not all ranks see the disk, "states/..." of them (one per rank). Where
islands have each dealt out their own, "optim/..." is one per island, under the number of its first rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.run.loss_scale import LossScale
from gossamer.run.staged_model import StagedModel
from gossamer.run.trainer import Progress
from gossamer.sharding import RowRange, ShardedOptimizer
from gossamer.spec.errors import BadInput, CheckpointMismatch, bad_input
from gossamer.store.checkpoint import Checkpoint, latest_good, list_checkpoints
from gossamer.store.slices import REPLICATED, NamedSlice, Slice
from gossamer.sync import GradientReducer, OuterLoop

_COMMON = "optim/common/"  # what islands have brought together: where there is none, they have not yet
_OF_ANY_RULE = frozenset({"main", "master", "common"})  # slots that say nothing of the rule


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The tensors of one rank's run."""

    module: nn.Module
    states: ShardedOptimizer
    replica: GradientReducer
    scaling: LossScale
    apart: OuterLoop
    progress: Progress
    cut: StagedModel | None = None  # where the module is stages of a model

    @property
    def islands(self) -> list[list[int]]:
        """Who trains together, where islands do so apart; none where all meet at every step."""
        return [list(island) for island in self.replica.levels.groups["island"]] if self.apart.fragments else []

    @property
    def _whose(self) -> int:
        """Under which number sharded state is written: that of the island, where each has another one."""
        return next((island[0] for island in self.islands if self.replica.rank in island), REPLICATED)

    def replicated(self) -> dict[str, Tensor]:
        """The same on every rank that holds it."""
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
        """This rank's own."""
        found = {f"exchange/{name}": tensor for name, tensor in self.replica.states().items()}
        found["rng/torch"] = torch.get_rng_state()
        if own := self.apart.own():
            found.update({f"island/{name}": tensor for name, tensor in own.items()})
            found.update({f"island/precision/{name}": tensor for name, tensor in self.scaling.state().items()})
            found["island/updates"] = torch.tensor(self.progress.updates)
            found.update(self._slots())
        return found

    def _slots(self) -> dict[str, Tensor]:
        """What the update rule keeps, where that is of whole parameters."""
        if self.states.is_sharded:
            return {}
        return {f"optim/{slot}/{param}": tensor for slot, param, _, tensor in self.states.slots()}

    def _sharded(self) -> list[NamedSlice]:
        """This rank's rows of what the update rule keeps, and of the parameters, where it has no more."""
        return self._slot_rows() + self._parameter_rows()

    def _slot_rows(self) -> list[NamedSlice]:
        slots = self.states.slots() if self.states.is_sharded else ()
        whose, params = self._whose, self.states.params
        return [_rows_of(f"optim/{slot}/{n}", params[n], rows, t, whose) for slot, n, rows, t in slots]

    def _parameter_rows(self) -> list[NamedSlice]:
        there = self.states.sharded.items()
        return [_rows_of(f"model/{name}", param, rows, t) for name, (param, rows, t) in there if rows.count]

    def pieces(self, writer: int, writers: int) -> list[NamedSlice]:
        """What writer number `writer` of `writers` on this host has to write: they are ranks one behind the other."""
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
        """What the writers on this host that hold this rank's stages divide among them, and the place among these.
        What several stages hold is the affair of the first that has a writer here.
        """
        first = self.replica.rank - writer
        places = [cut.stages_at(rank % cut.ranks) for rank in range(first, first + writers)]
        mine = places[writer]
        leaders = {name: next(s for s in _stages_with(cut, _bare(name)) if s in places) for name, _ in shared}
        alike = [i for i, place in enumerate(places) if place == mine]
        return [(n, t) for n, t in shared if leaders[n] == mine], alike.index(writer), len(alike)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointMismatch where it holds other tensors than `fill` will ask for, BadInput where the model has
        more to it than tensors.
        """
        _check_plain(self.module)
        names = frozenset(checkpoint.names())
        apart = "states/model/" if self.states.is_sharded else "states/"
        if not self.states.sharded and any(name.startswith(apart) for name in names):
            raise CheckpointMismatch(
                f"{checkpoint.folder} holds sharded states rank by rank, as no disk saw all of them: resume with the "
                "plan.states that it was saved with"
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
        """Raises CheckpointMismatch where it is the update rule that is another one, and not the model."""
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
        """Whether something that is the same on all ranks is not stored as such: what was trained in another way
        (together or apart, whole or sharded) goes on from what is there.
        """
        if name.startswith("outer/"):
            return not _was_apart(checkpoint)
        if name.startswith(("optim/main/", _COMMON, "precision/")):
            return not checkpoint.replicas(name)
        return name.startswith("optim/") and (_by_rank(checkpoint) or _was_apart(checkpoint))

    @torch.no_grad()
    def fill(self, checkpoint: Checkpoint, *, residuals: str = "merge") -> str:
        """Read everything of one that has passed `check` back, in place; what to tell the user about it, if anything.

        Exchange state and RNG belong to a rank. On another number of ranks the RNG starts anew, and `residuals` says
        what becomes of exchange state: `merge` shares out among the ranks what the former ones held together, so that
        all that was not sent will be; `drop` starts anew.
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
        if there and residuals == "merge":
            merged = {n: _merged(checkpoint, f"exchange/{n}", former, self.replica.ranks) for n in names}
            self.replica.restore(merged)
            return f"{told}resumed on {self.replica.ranks} ranks what {former} saved: exchange residuals were merged"
        why = "residuals: drop" if there else "not every rank's is stored here, or the exchange is another one"
        return f"{told}exchange residuals start anew ({why})" if names else told.removesuffix("; ")

    def _rows(self, checkpoint: Checkpoint, of: Slice, *, goes_on: bool) -> Tensor:
        """This rank's rows of a state, however it was kept."""
        by_rank = of.name.startswith("optim/") and _by_rank(checkpoint)
        if by_rank or f"states/{of.name}" in checkpoint.names():
            return self._of_this_rank(checkpoint, f"states/{of.name}")
        if of.name.startswith("optim/main/") and not checkpoint.replicas(of.name):  # it is what the parameter is
            return dict(self.states.parameters())[of.name.removeprefix("optim/main/")]
        return self._kept(checkpoint, of, goes_on=goes_on)

    def _kept(self, checkpoint: Checkpoint, of: Slice, *, goes_on: bool) -> Tensor:
        """A part of what the update rule had kept: on this rank's island, where it goes on, or on all of them."""
        if not goes_on:
            return _agreed(checkpoint, of)
        return checkpoint.read(of.name, of.start, of.size, _speaker(checkpoint, of.name, self.replica.rank))

    def _of_this_rank(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """A state that was written by rank, as no disk held all of it."""
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
        """Whether islands that were apart are so again, the same ones, and all that this rank's had is there."""
        if not self.apart.fragments or not _was_apart(checkpoint):
            return False
        same = int(checkpoint.meta["ranks"]) == self.replica.ranks and self._has_islands_of(checkpoint)
        return same and all(self.replica.rank in replicas for replicas in self._own_there(checkpoint).values())

    def _own_there(self, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        """Of what ranks of islands apart have for themselves, whose is there."""
        under_way = (n.removeprefix("island/") for n in checkpoint.names() if n.startswith("island/left/"))
        return {n: checkpoint.replicas(f"island/{n}") for n in (*self.apart.own(), *under_way)}

    def _fill_apart(self, checkpoint: Checkpoint, residuals: str, *, goes_on: bool) -> str:
        """What islands have for themselves; what to tell the user. Others than they were start from the anchor, with
        the mean of what the update rules kept.
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
        kept = {n: _merged(checkpoint, f"island/{n}", former, ranks) for n in owed if residuals == "merge"}
        self.apart.restore(shared, kept)
        return f"resumed on {ranks} ranks what {former} saved: all islands start from what they had agreed on; "


def _slots_told(slots: Collection[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"


@torch.no_grad()
def read_model(module: nn.Module, directory: Path) -> int:
    """Fill a module from the newest good checkpoint; returns its step. Raises CheckpointMismatch, or BadInput where
    there is none yet.
    """
    if not list_checkpoints(directory):
        raise BadInput(f"{directory} holds no checkpoint yet: let the run go on to its first one")
    checkpoint, _ = latest_good(directory)
    if any(name.startswith("states/model/") for name in checkpoint.names()):
        raise CheckpointMismatch(
            f"{checkpoint.folder} holds sharded parameters rank by rank, as no disk saw all of them: resume the run "
            "where it was, on a disk that all ranks see, or with plan.states zero2 from its start"
        )
    for name, tensor in named_state(module):
        tensor.copy_(checkpoint.read(f"model/{name}"))
    return int(checkpoint.meta["step"])


def whole(name: str, tensor: Tensor, replica: int) -> Slice:
    """The slice that is all of a tensor."""
    shape = tuple(tensor.shape)
    return Slice(name, shape, (0,) * len(shape), shape, replica)


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once, under their first name) and persistent buffers."""
    yield from module.named_parameters()
    persistent = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def _check_plain(module: nn.Module) -> None:
    """Raises BadInput where a state_dict has more than tensors, which a checkpoint has not."""
    for path, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            raise bad_input(
                wanted="a model whose state is its parameters and buffers, to go on from a checkpoint",
                got=f"{path or 'the model'} ({type(inner).__name__}) with get_extra_state, which no checkpoint keeps",
                do="keep that in a buffer, or train without a break",
                key="model",
            )


def trainable(module: nn.Module) -> Mapping[str, Tensor]:
    """The parameters that are trained, by canonical name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _whole_of(name: str, tensor: Tensor) -> Slice:
    return Slice.whole(name, tuple(tensor.shape))


def _was_apart(checkpoint: Checkpoint) -> bool:
    """Whether islands trained apart."""
    return "outer/counts/0" in checkpoint.names()


def _agreed(checkpoint: Checkpoint, of: Slice) -> Tensor:
    """A part of an update rule's state that all ranks shared, or the mean of what islands had each, rank by rank."""
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
    """Under which number what a rank had of an update rule's state stands there: its own, or its island's."""
    if rank in checkpoint.replicas(name):
        return rank
    return next((island[0] for island in checkpoint.meta.get("islands", ()) if rank in island), rank)


def _of_rank(checkpoint: Checkpoint, name: str, rank: int) -> Tensor:
    """What all ranks shared, or what this one had while islands were apart: another one's, where it was not there."""
    if checkpoint.replicas(name):
        return checkpoint.read(name)
    there = checkpoint.replicas(f"island/{name}")
    return checkpoint.read(f"island/{name}", replica=rank if rank in there else there[0])


def _by_rank(checkpoint: Checkpoint) -> bool:
    """Whether sharded state stands there rank by rank, and not as the tensors it is of."""
    return any(name.startswith("states/") for name in checkpoint.names())


def _rows_of(name: str, whole: Tensor, rows: RowRange, tensor: Tensor, replica: int = REPLICATED) -> NamedSlice:
    """Some rows of something shaped as a parameter."""
    shape = tuple(whole.shape)
    start = (rows.start, *(0 for _ in shape[1:])) if shape else ()
    return Slice(name, shape, start, tuple(tensor.shape), replica), tensor


def _stages_with(cut: StagedModel, name: str) -> Iterator[tuple[int, ...]]:
    """What lies together on the ranks that hold a tensor, by stage."""
    return (cut.stages_at(group[0]) for group in cut.holders(name))


def _bare(name: str) -> str:
    """Of "model/<name>" or "optim/<slot>/<name>"."""
    room, _, rest = name.partition("/")
    return rest.partition("/")[2] if room == "optim" else rest


def _merged(checkpoint: Checkpoint, name: str, former: int, ranks: int) -> Tensor:
    """What each of `ranks` gets of what `former` ranks held: residuals are parts of one sum and are shared out evenly;
    what was the same on all of them (a factor, an estimate of the mean, a counter) stays what it is.
    """
    held = [checkpoint.read(name, replica=r) for r in range(former)]
    if all(torch.equal(one, held[0]) for one in held):
        return held[0]
    return torch.stack(held).sum(0) / ranks if held[0].is_floating_point() else held[0]


def _balanced(shared: list[tuple[str, Tensor]], kept: Set[str], writer: int, writers: int) -> list[int]:
    """Indices for `writer` so that all write about as many bytes; the same answer on every rank.

    What is `kept`, buffers, each replica has of its own batches: all of them are the first writer's, as a mean of one
    replica and a variance of another are nobody's.
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
