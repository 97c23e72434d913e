"""The averaged point of a checkpoint whose optimizer is evaluated there: the one place where a reader computes it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gossamer import optimizer as optimizers
from gossamer.optimizer.master import Master
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import Checkpoint

AVERAGE = "average"  # in the metadata: the optimizer, as the configuration named it


@torch.no_grad()
def load_average(params: Iterable[tuple[str, Tensor]], found: Checkpoint) -> None:
    """Move `params`, which hold those of the checkpoint, to the averaged point of its optimizer, if it has one.

    Raises CheckpointMismatch where the optimizer states are not in one place.
    """
    written = found.meta.get(AVERAGE)
    if written is None:
        return
    rule, names = Master(inner=optimizers.build(written)), frozenset(found.names())
    if any(name.startswith("states/optim/") for name in names):
        raise CheckpointMismatch(
            f"{found.folder} holds sharded optimizer states rank by rank, as no disk held all of them, and the model "
            "is an average of these and the parameters: resume the run on the same hosts in a directory that all ranks "
            "share, or train with plan.sharding none from the start"
        )
    for name, tensor in params:
        slots = [slot for slot in rule.slots if f"optim/{slot}/{name}" in names]
        if slots:  # else it is not trained
            state = {slot: found.read(f"optim/{slot}/{name}") for slot in slots}
            tensor.copy_(rule.average({name: found.read(f"model/{name}")}, {name: state})[name])
