"""The files of a run whose states lie in tiers: by rank one of records, its journal, and where tensors lie in it.

They are read without the run that wrote them, which may have been killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.sharding._tier_layout import TierGroup
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.tier_file import TierJournal, mapped_tensor, not_in_use


def tier_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file; those beside it have other suffixes."""
    return folder / f"rank-{rank:05d}.tier"


def remove_left_over(folder: Path, ranks: int) -> None:
    """Remove what a run of more than `ranks` ranks has left, as a run removes what the one before it left."""
    for path in folder.glob("rank-*.tier"):
        number = path.stem.removeprefix("rank-")
        if number.isdigit() and int(number) >= ranks and path == tier_path(folder, int(number)):
            with not_in_use(path) as is_free:
                if is_free:
                    remove_files(path)


def read_tiers(folder: Path, rank: int = 0, updates: int = -1) -> tuple[int, dict[tuple[str, str], Tensor]]:
    """Return what a run that was killed has left: the updates made, and by (parameter, slot) the tensors after them.

    `rank`: whose file; with shard_group all it has some of the parameters, and empty tensors of the others. `updates`:
    after as many: the last, or with shard_group all the one before it, by which a rank may be ahead of one that was
    killed. The slot of a parameter itself is "". The tensors are mapped. Raises CheckpointMismatch where there is no
    such state.
    """
    path = tier_path(folder, rank)
    said, groups = TierJournal(path.with_suffix(".json")).read(), TierJournal(layout_file(path)).read()["groups"]
    found, records, last = {}, list(said["records"]), said["updates"]
    moved = said.get("moved", [])  # earlier versions, which had one rank, wrote none
    if updates == last - 1 and updates >= 0 and moved:
        last = updates
        for index in moved:
            records[index] = 1 - records[index]
    if updates not in (-1, last):
        raise CheckpointMismatch(f"{path}: wanted the state after {updates} updates, it holds the one after {last}")
    for group, record in zip(groups, records, strict=True):
        for name, slot, shape, dtype, start in group["tensors"]:
            at, kind = group["starts"][record] + start, getattr(torch, dtype)
            found[name, slot] = mapped_tensor(path, at, tuple(shape), kind)
    return last, found


def layout_file(path: Path) -> Path:
    """Return the path of what says where tensors lie in the tier file `path`."""
    return path.with_suffix(".layout.json")


def remove_files(path: Path) -> None:
    """Remove a tier file, its journal first: without one it holds nothing that counts."""
    for one in (path.with_suffix(".json"), layout_file(path), path):
        one.unlink(missing_ok=True)


def told_of(group: TierGroup) -> dict[str, Any]:
    """Return where the tensors of a group lie, for who reads the file without the run."""
    tensors = [[t.name, t.slot, list(t.shape), str(t.dtype).removeprefix("torch."), t.start] for t in group.tensors]
    return {"starts": list(group.starts), "tensors": tensors}
