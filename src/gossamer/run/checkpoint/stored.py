"""The form of the state that a checkpoint stores, and reads of it for ranks other than those that saved."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import Checkpoint
from gossamer.store.slices import REPLICATED, Slice

COMMON = "optim/common/"  # second moments averaged over islands: absent before the first average


def was_apart(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is of local-update training."""
    return "outer/counts/0" in checkpoint.names()


def by_rank(checkpoint: Checkpoint) -> bool:
    """Return whether sharded state is stored per rank, and not under the names of the full tensors."""
    return any(name.startswith("states/") for name in checkpoint.names())


def starts_anew(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the replicated tensor `name` is not stored as such.

    The run was then trained in another mode (synchronous or local updates, replicated or sharded states), and
    continues from the tensors that are stored.
    """
    if name.startswith("outer/"):
        return not was_apart(checkpoint)
    if name.startswith(("optim/main/", COMMON, "precision/")):
        return not checkpoint.replicas(name)
    return name.startswith("optim/") and (by_rank(checkpoint) or was_apart(checkpoint))


def agreed(checkpoint: Checkpoint, of: Slice) -> Tensor:
    """Return a slice of optimizer state: the stored one if all ranks shared it, else the mean over islands, weighted by
    ranks.
    """
    ranks = [r for r in checkpoint.replicas(of.name) if r != REPLICATED]
    if not ranks:
        return checkpoint.read(of.name, of.start, of.size)
    speakers = [speaker(checkpoint, of.name, rank) for rank in range(int(checkpoint.meta["ranks"]))]
    if not set(speakers) <= set(ranks):  # a mean over these would be another one on each disk
        raise CheckpointMismatch(
            f"{checkpoint.folder} holds {of.name} of ranks {ranks} of {checkpoint.meta['ranks']}, wanted all of them: "
            "copy the hosts' checkpoints together, or resume with as many ranks, each on the host where it was"
        )
    held = {one: checkpoint.read(of.name, of.start, of.size, one).double() for one in set(speakers)}
    return torch.stack([held[one] for one in speakers]).mean(0)


def speaker(checkpoint: Checkpoint, name: str, rank: int) -> int:
    """Return the replica number under which a rank's optimizer state is stored: its own or its island's."""
    if rank in checkpoint.replicas(name):
        return rank
    return next((island[0] for island in checkpoint.meta.get("islands", ()) if rank in island), rank)


def of_rank(checkpoint: Checkpoint, name: str, rank: int) -> Tensor:
    """Return a tensor that all ranks shared, or this rank's own from local-update training, or another rank's if it had
    none.
    """
    if checkpoint.replicas(name):
        return checkpoint.read(name)
    there = checkpoint.replicas(f"island/{name}")
    return checkpoint.read(f"island/{name}", replica=rank if rank in there else there[0])


def merged(checkpoint: Checkpoint, name: str, former: int, ranks: int) -> Tensor:
    """Return the state that each of `ranks` ranks gets from the states of `former` ranks.

    Residuals are parts of one sum and are divided evenly. A tensor that was the same on all ranks (a low-rank factor,
    an estimate of the mean, a counter) stays as it is.
    """
    held = [checkpoint.read(name, replica=r) for r in range(former)]
    if all(torch.equal(one, held[0]) for one in held):
        return held[0]
    return torch.stack(held).sum(0) / ranks if held[0].is_floating_point() else held[0]
