"""The weights in a checkpoint: "model/<parameter or buffer>"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer.model.adapter import adapter_tensors
from gossamer.model.quantized_linear import quantized_layers
from gossamer.model.side import side_tensors
from gossamer.run.checkpoint.average import load_average
from gossamer.run.checkpoint.choice import LATEST, open_chosen
from gossamer.run.checkpoint.holders import ParameterHolders
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.slices import row_slice
from gossamer.run.checkpoint.stored import BY_RANK, holds_under, other_sharding
from gossamer.sharding import ShardedOptimizer
from gossamer.spec.errors import BadInput, CheckpointMismatch, bad_input
from gossamer.store.checkpoint import Checkpoint, list_checkpoints
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource


@dataclass(frozen=True, slots=True)
class Weights(Stateful):
    """The weights that one rank holds: its model's parameters and persistent buffers.

    `global_parameters`: by name, those that all islands of local-update training share. They are saved in place of an
    island's own. `base`: digest of the model that an adapter is on, "" without one. With one, a checkpoint leaves
    out the frozen weights, and goes with this base alone.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("model/",)

    module: nn.Module
    states: ShardedOptimizer
    holders: ParameterHolders
    members: Membership
    global_parameters: Callable[[], Mapping[str, Tensor]]
    base: str = ""

    def meta(self) -> Mapping[str, Any]:
        return {"base": self.base} if self.base else {}

    def slices(self) -> Iterator[StateSlice]:
        shared, sharded = self.global_parameters(), self.states.sharded
        buffers = {name for name, _ in self.module.named_buffers()}
        for name, tensor in saved_state(self.module, self.base):
            if name not in sharded and self.holders.has(name):
                copies = SliceCopies.PER_REPLICA if name in buffers else SliceCopies.REPLICATED
                yield StateSlice.whole(f"model/{name}", shared.get(name, tensor), copies)
        copies = SliceCopies.SPARE if self.states.has_spare_parameters else SliceCopies.SHARDED
        copies = copies if self.states.divides_parameters else SliceCopies.REPLICATED  # or each rank's file has all
        saved = {name for name, _ in saved_state(self.module, self.base)}
        for name, (param, rows, tensor) in sharded.items():
            if rows.count and name in saved:
                yield StateSlice(row_slice(f"model/{name}", param, rows, tensor), tensor, copies)

    def wanted(self, source: StateSource) -> Iterator[StateSlice]:
        return (one for one in self.slices() if not self._is_by_rank(source, one))

    def ignores(self, name: str) -> bool:
        bare = name.removeprefix("model/")
        sharded = {*self.states.params, *self.states.sharded} if self.states.is_sharded else frozenset[str]()
        return bare in self.holders.elsewhere or bare in sharded  # a parameter of few rows lies on some ranks alone

    def cause(self, source: StateSource, missing: frozenset[str]) -> str:
        """Return that the weights were saved rank by rank, if they were, and this run's parameters are not sharded."""
        is_other = not self.states.divides_parameters and holds_under(source, f"{BY_RANK}model/")
        return other_sharding(source) if is_other else ""

    def check(self, source: StateSource) -> None:
        check_plain(self.module)
        check_base(source.meta.get("base", ""), self.base, source.label)
        if why := self.cause(source, frozenset()):
            raise CheckpointMismatch(why)
        for one in self.slices():
            if self._is_by_rank(source, one):
                self.members.check_own(source, BY_RANK + one.where.name)

    @torch.no_grad()
    def restore(self, source: StateSource) -> str:
        for one in self.slices():
            name = one.where.name
            is_own = self._is_by_rank(source, one)
            one.tensor.copy_(self.members.own(source, BY_RANK + name) if is_own else source.read(one.where))
        return ""

    def _is_by_rank(self, source: StateSource, one: StateSlice) -> bool:
        """Return whether each rank stored its rows of a sharded parameter for itself."""
        return one.copies.is_sharded and bool(source.versions(BY_RANK + one.where.name))


@torch.no_grad()
def read_model(module: nn.Module, directory: Path, base: str = "", checkpoint: str | int = LATEST) -> int:
    """Fill a module from a checkpoint in `directory` and return its step.

    Where the run is evaluated at its optimizer's averaged point, that is what it is filled with.

    `base`: digest of the model that an adapter is on, "" without one; its frozen weights are in the module already.
    `checkpoint`: "latest" (the newest good one), "best" or a step.
    Raises CheckpointMismatch, or BadInput if there is no checkpoint yet.
    """
    if not list_checkpoints(directory):
        raise BadInput(f"{directory} holds no checkpoint yet: let the run continue until its first one")
    found = open_chosen(directory, checkpoint)
    _check_together(found)
    check_base(found.meta.get("base", ""), base, str(found.folder))
    for name, tensor in saved_state(module, base):
        tensor.copy_(found.read(f"model/{name}"))
    load_average(saved_state(module, base), found)
    return int(found.meta["step"])


@torch.no_grad()
def read_part(module: nn.Module, names: frozenset[str], found: Checkpoint) -> None:
    """Give the parameters and persistent buffers of a module that are in `names` memory, with a checkpoint's values.

    It is that of a whole model. The parameters need no memory. Raises CheckpointMismatch.
    """
    _check_together(found)
    check_base(found.meta.get("base", ""), "", str(found.folder))
    wanted = [(name, tensor) for name, tensor in named_state(module) if name in names]
    for name, tensor in wanted:
        tensor.data = found.read(f"model/{name}").clone()
    load_average(wanted, found)


def _check_together(found: Checkpoint) -> None:
    if any(name.startswith("states/model/") for name in found.names()):
        raise CheckpointMismatch(
            f"{found.folder} holds sharded parameters rank by rank, as no disk held all of them: resume the run "
            "on the same hosts in a directory that all ranks share, or train with plan.sharding zero2 from the start"
        )


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters (tied ones once, under their first name) and persistent buffers, by name."""
    yield from module.named_parameters()
    persistent = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def saved_state(module: nn.Module, base: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint saves of `named_state`: all, or with a base what is not frozen in it."""
    if not base:
        yield from named_state(module)
        return
    own = {*(one.name for one in adapter_tensors(module)), *(name for name, _ in side_tensors(module))}
    blocks = {id(held) for layer in quantized_layers(module).values() for held in layer.buffers()}
    for name, tensor in named_state(module):
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and name not in own
        if not is_frozen and id(tensor) not in blocks:
            yield name, tensor


def check_base(stored: str, base: str, label: str) -> None:
    """Raise CheckpointMismatch unless a checkpoint was saved with this base model: the digests must be equal."""
    if stored != base:
        kinds = {False: "the weights of a whole model", True: "those of an adapter or side network alone"}
        raise CheckpointMismatch(
            f"{label} holds {kinds[bool(stored)]}{_digest(stored)}, and this run trains {kinds[bool(base)]}"
            f"{_digest(base)}: give the same base (model.hf, model.gguf, model.config, qfa's integers) and adapter "
            "or side network as before"
        )


def _digest(base: str) -> str:
    return f", on the base with digest {base}" if base else ""


def check_plain(module: nn.Module) -> None:
    """Raise BadInput for a module whose state_dict has more than tensors, which a checkpoint cannot hold."""
    for path, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            raise bad_input(
                wanted="a model whose state is only parameters and buffers, to resume from a checkpoint",
                got=f"{path or 'the model'} ({type(inner).__name__}) with get_extra_state, which no checkpoint saves",
                do="keep that state in a registered buffer, and start a new run",
                key="model",
            )


def trainable(module: nn.Module) -> Mapping[str, Tensor]:
    """Return the parameters that require a gradient, by canonical name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
