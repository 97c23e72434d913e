"""The weights in a checkpoint: "model/<parameter or buffer>"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.run.checkpoint.slices import rows_of
from gossamer.run.staged_model import StagedModel
from gossamer.sharding import ShardedOptimizer
from gossamer.spec.errors import BadInput, CheckpointMismatch, bad_input
from gossamer.store.checkpoint import Checkpoint, latest_good, list_checkpoints
from gossamer.store.slices import NamedSlice


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that one rank holds: its model's parameters and persistent buffers."""

    module: nn.Module
    states: ShardedOptimizer
    cut: StagedModel | None

    def replicated(self, common: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the full tensors; global parameters, `common`, take the place of local ones."""
        found: dict[str, Tensor] = {}
        sharded = self.states.sharded
        for name, tensor in named_state(self.module):
            if name not in sharded and (self.cut is None or name in self.cut.holds):
                found[f"model/{name}"] = common.get(name, tensor)
        return found

    def rows(self) -> list[NamedSlice]:
        """Return this rank's rows of sharded parameters."""
        there = self.states.sharded.items()
        return [rows_of(f"model/{name}", param, rows, t) for name, (param, rows, t) in there if rows.count]

    def buffers(self) -> set[str]:
        """Return the stored names of the buffers."""
        return {f"model/{name}" for name, _ in self.module.named_buffers()}

    def restore(self, checkpoint: Checkpoint, common: Mapping[str, Tensor]) -> None:
        """Load the full tensors of `replicated`."""
        for name, tensor in self.replicated(common).items():
            tensor.copy_(checkpoint.read(name))


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


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters (tied ones once, under their first name) and persistent buffers, by name."""
    yield from module.named_parameters()
    persistent = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def check_plain(module: nn.Module) -> None:
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
