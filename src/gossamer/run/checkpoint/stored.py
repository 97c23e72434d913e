"""The form of the state in a source, and reads of it for ranks other than those that saved."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gossamer.exchange import is_residual
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.slices import REPLICATED, Slice
from gossamer.store.stateful import StateSource

BY_RANK = "states/"  # before the names of sharded tensors that each rank stored for itself


def was_apart(source: StateSource) -> bool:
    """Return whether the source is of local-update training."""
    return bool(source.versions("outer/counts/0"))


def holds_under(source: StateSource, prefix: str) -> bool:
    """Return whether any tensor's name begins with `prefix`."""
    return any(name.startswith(prefix) for name in source.names())


def other_sharding(source: StateSource) -> str:
    """Return the message about sharded state of each rank, where this run's sharding has no such state."""
    return (
        f"{source.label} holds a separate sharded state of every rank, as no disk held all of them: resume with the "
        "plan.sharding that it was saved with"
    )


def check_agreed(source: StateSource, name: str) -> None:
    """Raise CheckpointMismatch if `agreed` cannot read a tensor: it is not there, or is there of some ranks only."""
    versions = source.versions(name)
    ranks = [rank for rank in versions if rank != REPLICATED]
    if not versions:
        raise CheckpointMismatch(f"{source.label} holds no {name}: resume with the settings that it was saved with")
    if ranks and not set(_speakers(source, name)) <= set(ranks):  # a mean over these would be another one on each disk
        raise CheckpointMismatch(
            f"{source.label} holds {name} of ranks {ranks} of {source.meta['ranks']}, wanted all ranks: "
            f"copy the checkpoints of all hosts into one directory, or resume with {source.meta['ranks']} ranks, each "
            "on the host where it ran before"
        )


def agreed(source: StateSource, of: Slice) -> Tensor:
    """Return a slice of optimizer state: the stored one if all ranks shared it, else the mean over islands, weighted by
    ranks.
    """
    check_agreed(source, of.name)
    if all(version == REPLICATED for version in source.versions(of.name)):
        return source.read(replace(of, replica=REPLICATED))
    speakers = _speakers(source, of.name)
    held = {one: source.read(replace(of, replica=one)).double() for one in set(speakers)}
    return torch.stack([held[one] for one in speakers]).mean(0)


def _speakers(source: StateSource, name: str) -> list[int]:
    """Return the replica number under which the optimizer state of every rank that saved is stored."""
    return [speaker(source, name, rank) for rank in range(int(source.meta["ranks"]))]


def speaker(source: StateSource, name: str, rank: int) -> int:
    """Return the replica number under which a rank's optimizer state is stored: its own or its island's."""
    if rank in source.versions(name):
        return rank
    return next((island[0] for island in source.meta.get("islands", ()) if rank in island), rank)


def of_rank(source: StateSource, name: str, rank: int) -> Tensor:
    """Return a tensor that all ranks shared, or this rank's own from local-update training, or another rank's if it had
    none.
    """
    if source.versions(name):
        return source.read_whole(name)
    there = source.versions(f"island/{name}")
    return source.read_whole(f"island/{name}", rank if rank in there else there[0])


def merged(source: StateSource, name: str, former: int, ranks: int) -> Tensor:
    """Return the state that each of `ranks` ranks gets from the states of `former` ranks.

    Residuals are parts of one sum and are divided evenly. A tensor that was the same on all ranks (a low-rank factor,
    an estimate of the mean, a counter) stays as it is.
    """
    held = [source.read_whole(name, rank) for rank in range(former)]
    if not is_residual(name) and all(torch.equal(one, held[0]) for one in held):
        return held[0]
    return torch.stack(held).sum(0) / ranks if held[0].is_floating_point() else held[0]
